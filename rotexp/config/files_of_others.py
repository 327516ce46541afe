"""What a file outside of rotexp's package may say to Hydra: where to write and what to vary, never what to import.

Hydra imports callbacks, handlers of logs, packages to search and parts of sweepers as soon as a file names them, before
rotexp sees a configuration, and such a file may be somebody else's: the resolved configuration of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra._internal.hydra as hydra_internals
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

HARMLESS = (
    "run.dir",
    "sweep.dir",
    "sweep.subdir",
    "job.name",
    "job.chdir",
    "job.config",
    "output_subdir",
    "help",
    "sweeper.params",
    "sweeper.max_batch_size",
    "sweeper.n_trials",
    "sweeper.n_jobs",
    "sweeper.direction",
    "sweeper.study_name",
    "sweeper.storage",
    "sweeper.sampler",
    "launcher",
)
"""Keys below `hydra` that a file may set, with all below them but names that begin with `_`, such as `_target_`."""

BUILT = ("sweeper", "launcher")
"""Those of which Hydra makes objects, so that a reference to another part of the file could smuggle one in."""


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader, which checks every file at the place that its package gives it, before it is composed."""

    def _process_config_searchpath(self, config_name: str | None, parsed_overrides: list[Override], repo: Any) -> None:
        """Check the primary file first, whose packages to search are imported at once."""
        found = None if config_name is None else repo.load_config(config_path=config_name)
        if found is not None:
            check_file(found, str(config_name))
        super()._process_config_searchpath(config_name, parsed_overrides, repo)

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        """Check every file that is composed."""
        result = super()._load_single_config(default, repo)
        check_file(result, str(default.config_path))
        return result


@contextmanager
def checked_files() -> Iterator[None]:
    """Let Hydra check the files that it loads for what is made inside the block."""
    hydra_internals.ConfigLoaderImpl = CheckedLoader  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hydra_internals.ConfigLoaderImpl = ConfigLoaderImpl  # type: ignore[attr-defined]


def check_file(result: ConfigResult, name: str) -> None:
    """Refuse a file outside of packages that says something to Hydra which may import.

    Args:
        name: of the file, below the folder that is searched.

    Raises:
        ValueError: it does.
    """
    config = result.config
    if not result.path.startswith("file://") or not isinstance(config, DictConfig) or "hydra" not in config:
        return
    said = OmegaConf.to_container(config, resolve=False)
    assert isinstance(said, dict)
    for key, value in _leaves(said["hydra"], ()):
        if not _is_harmless(key, value):
            where = f"{result.path.removeprefix('file://')}/{name.removesuffix('.yaml')}.yaml"
            shown = ".".join(["hydra", *key])
            raise ValueError(
                f"{shown}: is set by a file ({where}), which may not say what is imported; "
                f"{_remedy(key)}, or type it on the command line if it is yours"
            )


def _remedy(key: tuple[str, ...]) -> str:
    return "name folders, file://DIR" if key[:1] == ("searchpath",) else "remove it"


def _leaves(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value that is no mapping or list with something in it, and the names that lead to it."""
    if isinstance(value, (dict, list)) and value:
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(child, (*key, str(name)))
    elif key or value != {}:
        yield key, value


def _is_harmless(key: tuple[str, ...], value: Any) -> bool:
    text = str(value).strip()
    if key[:1] == ("searchpath",):
        return value == [] or (len(key) == 2 and (text.startswith("file://") or not ("://" in text or "${" in text)))
    if key[:2] == ("sweeper", "params") and len(key) > 2 and key[2].lstrip("+~").startswith("hydra"):
        return False
    if key[:1] in {(name,) for name in BUILT} and text.startswith("${") and text.endswith("}"):
        return False
    known = any(f"{'.'.join(key)}.".startswith(f"{harmless}.") for harmless in HARMLESS)
    return known and not any(name.startswith("_") for name in key)
