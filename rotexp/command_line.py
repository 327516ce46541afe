"""Run a command through Hydra, and answer a wrong request by one line and exit code 2."""

from __future__ import annotations

import difflib
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rotexp.config import COMPONENTS, Config, writable

WRONG_REQUEST = 2


def run_command(job: Callable[[DictConfig], int]) -> None:
    """Compose the configuration from the command line, run the job, exit with its code (of several, the highest)."""
    codes = [0]

    def run(composed: DictConfig) -> None:
        try:
            codes.append(job(composed))
        finally:
            _remove_if_empty(Path(HydraConfig.get().runtime.output_dir))

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints in its own format and exits with 1
    try:
        hydra.main(config_path="pkg://rotexp.conf", config_name="config", version_base="1.3")(run)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        sys.stderr.write(f"rotexp: {' '.join(explain(error).split())}\n")
        sys.exit(WRONG_REQUEST)
    sys.exit(max(codes))


def register() -> None:
    """Give Hydra the schema and the resolver of unique folder names."""
    OmegaConf.register_new_resolver("unique", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    store = ConfigStore.instance()
    store.store("schema", writable(Config))
    for group, options in COMPONENTS.items():
        for name, schema in options.items():
            store.store(name, writable(schema), group=f"schema/{group}")


def explain(error: Exception) -> str:
    """Say in one line what was wrong with a request: the key, the value, what is allowed, what to do."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = [name for name in error.options or () if name != "__init__"]
        return f"{group}={option}: no such option; choose one of {', '.join(options)}{_nearest(option, options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not of the form key=value ({error}); quote values with special characters"
    if isinstance(error, ConfigCompositionException):
        return _explain_override(error)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {str(error.msg).splitlines()[0]}"
    return str(error)


def _explain_override(error: ConfigCompositionException) -> str:
    text, cause = str(error), error.__cause__
    if text.startswith("Could not override"):
        key = text.split("'")[1]
        return f"{key}: no such key; see --cfg job for all of them{_nearest(key, list(_keys()))}"
    override = text.removeprefix("Error merging override ")
    return override if cause is None else f"{override}: {str(cause).splitlines()[0]}"


def _nearest(word: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=3)
    return f" (nearest: {', '.join(near)})" if near else ""


def _keys() -> Iterator[str]:
    """Yield every key of the schema, groups and components included."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key in node:
            yield f"{prefix}{key}"
            child = node._get_node(key)
            if isinstance(child, DictConfig):
                yield from walk(child, f"{prefix}{key}.")

    yield from walk(OmegaConf.structured(Config), "")
    for group, options in COMPONENTS.items():
        for schema in options.values():
            yield from walk(OmegaConf.structured(schema), f"{group}.")


def _remove_if_empty(folder: Path) -> None:
    """Leave no trace of a request that was refused."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
