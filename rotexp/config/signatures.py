"""Check the options that a configuration gives to a class against what its constructor takes."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

KINDS: dict[Any, tuple[tuple[type[Any], ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    type(None): ((type(None),), "null"),
}
"""What a value must be for a parameter of that type, and what to call it; other types are the constructor's affair."""

GIVEN = {
    "optimizer": 1,
    "objective": 0,
    "train.scheduler": 1,
    "rotation.start": 0,
    "data": 0,
    "quant.weights": 0,
    "quant.activations": 0,
    "quant.kv": 0,
    "tracker": 1,
    "sharding": 0,
}
"""How many positional arguments rotexp itself gives to the class at a key."""

GIVEN_BY_NAME = {"train.scheduler": ("num_warmup_steps", "num_training_steps")}
"""The keyword arguments that rotexp itself gives to the class at a key, where its constructor names them."""

TAKES_NAMES = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Parameters that an option can be given for."""


def takes(found: type[Any], option: str) -> bool:
    """Return whether a class's constructor takes a keyword argument."""
    parameters = inspect.signature(found).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or (p.name == option and p.kind in TAKES_NAMES) for p in parameters)


def check_options(
    found: type[Any], options: Mapping[str, Any], *, key: str, target: str, known: Collection[str] = ()
) -> None:
    """Refuse options that a class does not take, that are of another type than it says, or that are missing.

    Args:
        key: of the component, for messages.
        target: what the configuration calls the class.
        known: options that the group has beside those of the class, for messages.

    Raises:
        ValueError: one is refused.
    """
    given = GIVEN.get(key)
    parameters = list(inspect.signature(found).parameters.values())[given or 0 :]
    ours = GIVEN_BY_NAME.get(key, ())
    named = {part.name: part for part in parameters if part.kind in TAKES_NAMES and part.name not in ours}
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for option in options:
        if option not in named and not any_name:
            allowed = list(dict.fromkeys([*named, *sorted(known)]))
            near = difflib.get_close_matches(option, allowed, n=1)
            choices = f"choose one of {', '.join(allowed)}, or leave it out"
            choices = choices if allowed else "it takes none; leave it out"
            raise ValueError(
                f"{key}.{option}: is no option of {target}; {choices}{f' (nearest: {near[0]})' if near else ''}"
            )
    for name, parameter in named.items() if given is not None else ():
        if name not in options and parameter.default is parameter.empty:
            raise ValueError(f"{key}.{name}: has no value, which {target} needs; write it beside _target_")
    _check_types(found, options, key=key)


def named_by(found: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those keyword arguments that a class's constructor names."""
    names = inspect.signature(found).parameters
    return {name: value for name, value in arguments.items() if name in names}


def _check_types(found: type[Any], options: Mapping[str, Any], *, key: str) -> None:
    try:
        hints = typing.get_type_hints(found.__init__)
    except (NameError, TypeError):  # names that are imported for type checkers alone
        return
    for option, value in options.items():
        allowed = _alternatives(hints.get(option, Any))
        if not all(kind in KINDS for kind in allowed):
            continue
        truth = isinstance(value, bool)  # which Python takes for a number
        if not any(isinstance(value, KINDS[kind][0]) and (truth <= (kind is bool)) for kind in allowed):
            kinds = " or ".join(KINDS[kind][1] for kind in allowed)
            raise ValueError(f"{key}.{option}={value}: must be {kinds}; change it or leave it out")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)
