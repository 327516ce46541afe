"""Call what a configuration's `_target_` names, after checking that it is rotexp's or a plug-in's."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from rotexp.config.components import Component, Pluggable
from rotexp.config.plugins import import_plugin, installed_plugins
from rotexp.config.schema import COMPONENTS
from rotexp.config.signatures import GIVEN, TAKES_NAMES, check_options, takes
from rotexp.errors.library import refused
from rotexp.errors.requirements import require


class NotGrantedError(ValueError):
    """A part of the user's own whose module was not named by `plugins`."""


OURS = {
    "optimizer": "rotexp.optim",
    "objective": "rotexp.training.objectives",
    "tracker": "rotexp.tracking",
    "sharding": "rotexp.sharding",
}
"""The package of rotexp's own of which `_target_` may name a class, by the key of the part."""


def build(component: Any, *arguments: Any) -> Any:
    """Call the class that a checked component's `_target_` names, with `arguments` and the component's options."""
    factory = factory_of(component)
    return factory(*arguments, **options_of(component, factory, given=len(arguments)))


def factory_of(component: Any) -> Any:
    """Return the class that a checked component's `_target_` names."""
    module, _, name = component._target_.rpartition(".")
    return getattr(importlib.import_module(module), name)


def made(component: Any, *arguments: Any, key: str, protocol: type[Any]) -> Any:
    """Build a component, and refuse one that cannot be made or lacks what a Protocol asks for.

    Args:
        key: of the component, for messages.

    Raises:
        ValueError: its class raised something, or the part has no attribute of a name that is needed.
    """
    where = f"{key}._target_={component._target_}"
    with refused(lambda reason: f"{where}: cannot be made of its options ({reason}); change them, or correct it"):
        part = build(component, *arguments)
    _require_members(part, members(protocol), where=where, protocol=protocol)
    return part


def check_members(component: Any, *, key: str, protocol: type[Any]) -> None:
    """Refuse a component whose class lacks a method that a Protocol asks for, where it cannot be made yet.

    Raises:
        ValueError: it does.
    """
    methods = [name for name in members(protocol) if callable(getattr(protocol, name, None))]
    where = f"{key}._target_={component._target_}"
    _require_members(factory_of(component), methods, where=where, protocol=protocol)


def _require_members(part: Any, names: Sequence[str], *, where: str, protocol: type[Any]) -> None:
    for name in names:
        if not hasattr(part, name):
            asks = f"which {protocol.__module__}.{protocol.__name__} asks for"
            raise ValueError(f"{where}: has no {name}, {asks}; add it")


def members(protocol: type[Any]) -> list[str]:
    """Return the names of the attributes and methods that a Protocol asks for."""
    names = dict.fromkeys([*inspect.get_annotations(protocol), *vars(protocol)])
    return [name for name in names if name == "__call__" or not name.startswith("_")]


def options_of(component: Any, factory: Any = None, *, given: int = 0) -> dict[str, Any]:
    """Return the keyword arguments that a component's class is called with.

    Args:
        factory: the class, if it may be one of the user's own in the place of a group's.
        given: how many positional arguments it is given beside them.
    """
    if isinstance(component, Pluggable) and inspect.isclass(factory):
        return _handed_on(component, list(inspect.signature(factory).parameters.values())[given:]) | component.options
    if isinstance(component, (Component, Pluggable)):
        return dict(component.options)
    options = {option.name: getattr(component, option.name) for option in dataclasses.fields(component)}
    return {key: value for key, value in options.items() if key not in ("name", "_target_")}


def _handed_on(component: Pluggable, parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """Return the options of the group that a class names too, if they were set or the class needs them.

    Else the class has its own default: the group's is that of rotexp's parts.
    """
    named = {parameter.name: parameter for parameter in parameters if parameter.kind in TAKES_NAMES}
    usual, handed_on = type(component)(), dict[str, Any]()
    for name in named.keys() & component.fields_of_group():
        value = getattr(component, name)
        if value != getattr(usual, name) or named[name].default is inspect.Parameter.empty:
            handed_on[name] = value.name if isinstance(value, Enum) else value
    return handed_on


def components_of(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every part of a configuration that `_target_` names, with its key."""
    if getattr(config, "_target_", None) is not None:
        yield key, config
    for option in dataclasses.fields(config) if not isinstance(config, Component) else ():
        value = getattr(config, option.name)
        if dataclasses.is_dataclass(value):
            yield from components_of(value, f"{key}.{option.name}".lstrip("."))


def check_target(component: Any, *, key: str, plugins: Sequence[str] = ()) -> None:
    """Refuse a component whose `_target_` is neither a class that a module of rotexp's itself defines nor a plug-in's.

    The text of rotexp's modules is read, not run: what they import cannot be reached through them. A plug-in is
    imported; so is a module of rotexp's whose options have no dataclass.

    Args:
        key: of the component, for messages.
        plugins: modules that were granted, beside those that installed packages grant.

    Raises:
        ValueError: it is refused, cannot be imported, or does not take these options.
    """
    target = str(component._target_)
    module, _, name = target.rpartition(".")
    granted = (*plugins, *installed_plugins())
    if any(f"{module}.".startswith(f"{plugin}.") for plugin in granted):
        found = getattr(import_plugin(module, where=f"{key}._target_={target}"), name, None)
        own = inspect.isclass(found) and any(f"{found.__module__}.".startswith(f"{plugin}.") for plugin in granted)
        require(own, f"{key}._target_", target, f"a class that {' or '.join(granted)} itself defines", "name another")
        assert inspect.isclass(found)
        options = options_of(component, found, given=GIVEN.get(key, 0))
        _check_described(component, found, options, key=key)
        known = component.fields_of_group() if isinstance(component, Pluggable) else ()
        check_options(found, options, key=key, target=target, known=known)
        return
    room, root = OURS.get(key), target.partition(".")[0]
    allowed = f"a class of {'a plug-in' if room is None else f'{room}, or of a plug-in'}"
    if root not in ("rotexp", target):
        raise NotGrantedError(f"{key}._target_={target}: must be {allowed}; type plugins=[{root}] if it is yours")
    inside = room is not None and target.startswith(f"{room}.") and name in _classes(module)
    require(inside, f"{key}._target_", target, allowed, "leave it as the option sets it")
    if isinstance(component, (Component, Pluggable)) and component.options:
        check_options(getattr(importlib.import_module(module), name), component.options, key=key, target=target)


def _check_described(component: Any, found: type[Any], options: Mapping[str, Any], *, key: str) -> None:
    """Refuse a class that was set alone, over the options of a part of rotexp's which it does not take."""
    name = getattr(component, "name", None)
    unknown = [option for option in options if not takes(found, option)]
    if unknown and name in COMPONENTS.get(key, {}):
        raise ValueError(
            f"{key}._target_={component._target_}: takes no {unknown[0]}, an option of {key}={name} in whose place it "
            f"was set; describe it in a file {key}/NAME.yaml, and choose it by --config-dir DIR {key}=NAME"
        )


@cache
def _classes(module: str) -> frozenset[str]:
    """Return the classes that a module of rotexp's defines, or, where it is a package, takes from its own modules."""
    parts = module.split(".")[1:]
    if not all(part.isidentifier() for part in parts):
        return frozenset()
    place = Path(__file__).parents[1].joinpath(*parts)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    body = ast.parse(file.read_bytes()).body if file.is_file() else []
    taken = {
        alias.name
        for node in body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{module}.")
        for alias in node.names
        if alias.name in _classes(str(node.module))
    }
    return frozenset(taken | {node.name for node in body if isinstance(node, ast.ClassDef)})
