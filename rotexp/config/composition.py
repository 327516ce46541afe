"""From Hydra's composition to frozen dataclasses and back to text that repeats the run."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rotexp.config.own_parts import field_names, gathered, schema_of, spread
from rotexp.config.plugins import check_granted, check_importable, granted_plugins
from rotexp.config.schema import Config
from rotexp.config.validation import validate

HYDRA_OVERRIDES = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
"""What every primary config must say for itself: Hydra writes no log files of its own."""

IDS_OR_PATHS = ("model.path", "data.path")
RECORDED_PATHS = (*IDS_OR_PATHS, "data.calibration", "data.evaluation", "rotation.path", "resume")
"""The keys of a run whose values are paths, or may be."""
PATHS = (*RECORDED_PATHS, "run", "out", "export.path")
"""Those of every command."""
NO_PATHS = ("", "auto", "never")
"""Values that are none."""


class UnknownKeyError(ValueError):
    """A key that the schema does not have."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: no such key; remove it")
        self.key = key


def to_config(composed: DictConfig, *, typed: Sequence[str] | None = None) -> Config:
    """Turn Hydra's composition into frozen dataclasses, paths written from the root, and check it.

    Args:
        typed: the plug-ins that were typed (None: those that were granted to this process).

    Raises:
        ValueError: a value, or a combination of values, that cannot be used.
    """
    if OmegaConf.get_type(composed) is not Config:
        raise ValueError("the configuration is not based on the schema; begin its defaults list with `- schema`")
    typed = granted_plugins() if typed is None else typed
    check_granted(composed.plugins, typed)
    check_importable(typed)
    composed = gathered(composed)
    composed.plugins = list(typed)
    if unknown := next(_unknown_keys(composed), None):
        raise UnknownKeyError(unknown)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        group = missing[0].partition(".")[0]
        raise ValueError(f"{missing[0]}: has no value; choose one by {group}=OPTION, or set {missing[0]}=…")
    config = OmegaConf.to_object(from_root(composed, RECORDED_PATHS, base=Path.cwd()))
    assert isinstance(config, Config)
    validate(config)
    return config


def from_root(composed: DictConfig, keys: Iterable[str], *, base: Path) -> DictConfig:
    """Return a composition with the paths at these keys written from the root; links in them are not followed.

    The name that was typed says the format of a file, not that of what it links to. What may be an id of the hub is a
    path where there is something of that name.

    Args:
        base: the folder that relative paths start from.
    """
    written = copy.deepcopy(composed)
    for key in keys:
        value = OmegaConf.select(written, key)
        if not isinstance(value, str) or value in NO_PATHS or (key in IDS_OR_PATHS and not (base / value).exists()):
            continue
        OmegaConf.update(written, key, str(whole_path(base / value)))
    return written


def whole_path(path: Path | str) -> Path:
    """Return a path from the root without `..`, before which links are followed; elsewhere they keep their names."""
    path = Path(path).absolute()
    if ".." not in path.parts:
        return path
    return path.resolve() if path.name == ".." else path.parent.resolve() / path.name


def _unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the keys that are in no dataclass; Hydra's `++` adds such, and files of the user's own may."""
    known = field_names(schema_of(node))
    for key in node:
        if key not in known:
            yield f"{prefix}{key!s}"
        elif key != "options" and isinstance(child := node._get_node(key), DictConfig) and not child._is_none():
            yield from _unknown_keys(child, f"{prefix}{key}.")


def to_plain(config: Config) -> dict[str, Any]:
    """Return `config` as nested dicts of plain values (enums as their names), as it is written in text.

    The options of the user's own parts stand beside `_target_`; `plugins` are left out, for no file grants them.
    """
    return {key: value for key, value in spread(_plain(config)).items() if key != "plugins"}


def _plain(value: Any) -> Any:
    """Do what OmegaConf does by way of its nodes, which takes 50 times as long."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the keys of nested dicts whose values differ, dotted, with the values they had before."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = old
    return found


def resolved_yaml(config: Config) -> str:
    """Return YAML that runs again: `python -m rotexp.train --config-dir DIR --config-name config.resolved`."""
    header = ["hydra_settings", "schema", "_self_", *HYDRA_OVERRIDES]
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": header, **to_plain(config)}))


def config_digest(config: Config) -> str:
    """Return 16 hex digits that differ when any value of the configuration differs."""
    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True).encode()).hexdigest()[:16]
