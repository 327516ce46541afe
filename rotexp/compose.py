"""From Hydra's composition to frozen dataclasses and back to text that repeats the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from rotexp.config import COMPONENTS, Config, DataConfig, RotationConfig
from rotexp.validation import validate

Group = TypeVar("Group", DataConfig, RotationConfig)

HYDRA_OVERRIDES = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
"""What every primary config must say for itself: Hydra writes no log files of its own."""


def writable(schema: Any) -> DictConfig:
    """Return the structured config of a frozen dataclass, without the read-only flag OmegaConf gives those."""
    config: DictConfig = OmegaConf.structured(schema)
    pending = [config]
    while pending:
        node = pending.pop()
        node._set_flag("readonly", None)
        pending += [child for key in node if isinstance(child := node._get_node(key), DictConfig)]
    return config


class UnknownKeyError(ValueError):
    """A key that the schema does not have."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: no such key; remove it")
        self.key = key


def to_config(composed: DictConfig) -> Config:
    """Turn Hydra's composition into frozen dataclasses, file names made absolute, and check it.

    Raises:
        ValueError: a value, or a combination of values, that cannot be used.
    """
    if OmegaConf.get_type(composed) is not Config:
        raise ValueError("the configuration is not based on the schema; begin its defaults list with `- schema`")
    if unknown := next(_unknown_keys(composed), None):
        raise UnknownKeyError(unknown)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        group = missing[0].partition(".")[0]
        raise ValueError(f"{missing[0]}: has no value; choose one by {group}=OPTION, or set {missing[0]}=…")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    data, rotation = config.data, config.rotation
    if config.resume not in ("", "auto", "never"):
        config = dataclasses.replace(config, resume=str(Path(config.resume).resolve()))
    config = dataclasses.replace(
        config,
        data=_absolute_files(data, "calibration", "evaluation"),
        rotation=_absolute_files(rotation, "path"),
    )
    validate(config)
    return config


def _unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the keys that are in no dataclass; Hydra's `++` adds such, and files of the user's own may."""
    schema = OmegaConf.get_type(node)
    known = {option.name for option in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else set()
    for key in node:
        if key not in known:
            yield f"{prefix}{key!s}"
        elif isinstance(child := node._get_node(key), DictConfig) and not child._is_none():
            yield from _unknown_keys(child, f"{prefix}{key}.")


def _absolute_files(options: Group, *names: str) -> Group:
    """Return the options with the files that these fields name written from the root; links stay links."""
    named = {name: getattr(options, name) for name in names}
    files: dict[str, Any] = {name: str(whole_path(file)) for name, file in named.items() if file}
    return dataclasses.replace(options, **files)


def whole_path(path: Path | str) -> Path:
    """Return a path from the root; a file that is a link keeps the name that was typed, which says its format."""
    path = Path(path)
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def to_plain(config: Config) -> dict[str, Any]:
    """Return `config` as nested dicts of plain values (enums as their names)."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


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
    schemas = [{f"schema/{group}@{group}": getattr(config, group).name} for group in COMPONENTS]
    header = ["hydra_settings", "schema", *schemas, "_self_", *HYDRA_OVERRIDES]
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": header, **to_plain(config)}))


def config_digest(config: Config) -> str:
    """Return 16 hex digits that differ when any value of the configuration differs."""
    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True).encode()).hexdigest()[:16]
