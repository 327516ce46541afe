"""The options of the user's own parts: beside `_target_` in text, gathered under `options` in memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf

from rotexp.config.components import Component, Pluggable
from rotexp.config.schema import COMPONENTS


def writable(schema: Any) -> DictConfig:
    """Return the structured config of a frozen dataclass, without the read-only flag OmegaConf gives those.

    Groups that take a part of the user's own take any key: it may be an option of that part.
    """
    config: DictConfig = OmegaConf.structured(schema)
    pending = [config]
    while pending:
        node = pending.pop()
        node._set_flag("readonly", None)
        if is_pluggable(node):
            node._set_flag("struct", False)
        pending += _children(node)
    return config


def as_text_has_it(part: Any) -> DictConfig:
    """Return the config of a part as a file has it: typed where its options are, else its options beside `_target_`."""
    if not isinstance(part, Component):
        return writable(part)
    return OmegaConf.create({"name": part.name, "_target_": part.target, **part.options})


def schema_of(node: DictConfig) -> type[Any]:
    """Return the dataclass that a node is based on, or `dict`."""
    return OmegaConf.get_type(node) or dict


def is_pluggable(node: Any) -> bool:
    """Return whether a node is a group that takes a part of the user's own, and so options of any name."""
    return isinstance(node, DictConfig) and issubclass(schema_of(node), Pluggable)


def field_names(schema: type[Any]) -> set[str]:
    """Return the fields of a dataclass; none of `dict`."""
    return {option.name for option in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else set()


def gathered(composed: DictConfig) -> DictConfig:
    """Return a composition in which the options of every part without a schema are gathered under `options`.

    A part of rotexp's that has a schema gets it, whichever file named the part.
    """
    whole = copy.deepcopy(composed)
    pending = [whole]
    while pending:
        node = pending.pop()
        for key in [key for key in node if node._get_node(key) in _children(node)]:
            child = node[key]
            if child.get("_target_") is not None and schema_of(child) is dict:
                _replace(node, key, _typed(child._target_))
            elif child.get("_target_") is not None and issubclass(schema_of(child), Pluggable):
                node[key] = _gather(child, schema_of(child))
            else:
                pending.append(child)
    return whole


def _typed(target: str) -> Any | None:
    """Return the part of rotexp's with that `_target_` whose options have a dataclass, if there is one."""
    ours = (part for options in COMPONENTS.values() for part in options.values() if not isinstance(part, Component))
    return next((part for part in ours if part._target_ == target), None)


def _replace(node: DictConfig, key: Any, part: Any | None) -> None:
    """Give a part that is named without a schema that of `part`, or gather its options (None: it has none)."""
    child = node[key]
    if part is None:
        node[key] = _gather(child, Component)
        return
    node[key] = writable(part)
    node[key]._set_flag("struct", False)  # so that an unknown key can be told by its whole name
    node[key].merge_with(child)


def _gather(node: DictConfig, schema: type[Any]) -> DictConfig:
    known = field_names(schema) - {*getattr(schema, "HANDED_ON", ())}
    values: dict[str, Any] = {str(key): node._get_node(key) for key in node if key in known}
    own = {str(key): node._get_node(key) for key in node if key not in known}
    if "HANDED_ON" in vars(schema):  # those that are null were not given
        own = {key: value for key, value in own.items() if key not in schema.HANDED_ON or node[key] is not None}
    if "name" in known and ("name" not in values or OmegaConf.is_missing(node, "name")):
        values["name"] = str(node._target_).rpartition(".")[2]
    merged = OmegaConf.merge(writable(schema), values | {"options": {**(node.get("options") or {}), **own}})
    assert isinstance(merged, DictConfig)
    for key in merged:
        value = merged._get_node(key)
        if isinstance(value, Node) and value._is_missing() and value._is_optional():
            merged[key] = None  # what only rotexp's own parts need
    return merged


def spread(plain: Mapping[Any, Any]) -> dict[str, Any]:
    """Return nested dicts in which the options of every part stand beside its `_target_`."""
    values = {str(key): spread(value) if isinstance(value, dict) else value for key, value in plain.items()}
    if not {"_target_", "options"} <= values.keys():
        return values
    options = values.pop("options")
    if values["_target_"] is None:  # the group's own part
        del values["_target_"]
    return values | options


def _children(node: DictConfig) -> list[DictConfig]:
    children = (node._get_node(key) for key in node)
    return [
        child
        for child in children
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing()
    ]
