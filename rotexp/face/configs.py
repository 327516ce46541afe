"""Compose a configuration from Python as the command line does, and leave Hydra as it was."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, open_dict
from omegaconf.basecontainer import BaseContainer

from rotexp.config.composition import to_config
from rotexp.config.explanations import REFUSALS, TRAINING, Vocabulary, check_overrides, explain
from rotexp.config.files_of_others import checked_files
from rotexp.config.own_parts import writable
from rotexp.config.plugins import granting, typed_plugins
from rotexp.config.schema import Config
from rotexp.errors.requirements import MISSING
from rotexp.launch.command_line import register

OF_HYDRA = ("hydra.run.dir", "hydra.searchpath")
"""What may be set of Hydra's own from Python: the rest concerns the command's process, or sweeps."""

COMPOSING = RLock()
"""Held while a configuration is composed, since Hydra's state is the whole process's."""


@dataclass(frozen=True)
class Composed:
    """A composition, and the folder in which the command would run it."""

    config: DictConfig
    folder: Path


def load_config(
    overrides: Sequence[str] = (), *, config_name: str = "config", config_dir: str | Path | None = None
) -> Config:
    """Compose a configuration from overrides, as on the command line, and check it.

    Args:
        overrides: such as `["model=tiny", "quant=w4a8", "train.steps=20"]`; one value a key.
        config_name: a config of rotexp's own or of `config_dir`, such as `config.resolved` of a run's folder.
        config_dir: a folder of configs of your own, as `--config-dir`.

    Returns:
        Frozen dataclasses; change them by `dataclasses.replace`, and `rotexp.run` checks them again.

    Raises:
        ValueError: in one line the key, its value, what is allowed, what to do.
    """
    with composed(overrides, config_name=config_name, config_dir=config_dir) as composition:
        return to_config(composition.config)


@contextmanager
def composed(
    overrides: Sequence[str],
    *,
    config_name: str = "config",
    config_dir: str | Path | None = None,
    known: Vocabulary = TRAINING,
    plugins: Sequence[str] = (),
) -> Iterator[Composed]:
    """Yield what overrides compose to; what the block refuses is explained like a wrong command line.

    Args:
        known: what the overrides may set.
        plugins: granted beside those that the overrides name.

    Raises:
        ValueError: the request is wrong.
    """
    try:
        lines = _checked(overrides, known)
        granted = list(dict.fromkeys((*plugins, *typed_plugins(lines))))
        with COMPOSING, _own_hydra(), checked_files(), granting(granted):
            register()
            path = create_config_search_path("pkg://rotexp.conf")
            if config_dir is not None:
                path.prepend("command-line", f"file://{_folder(config_dir)}", anchor="schema")
            Hydra.create_main_hydra2("rotexp", path)
            config = _primary(config_name, lines)
            folder = Path(config.hydra.run.dir)
            with open_dict(config):
                del config["hydra"]
            yield Composed(config, folder)
    except REFUSALS as error:
        raise ValueError(" ".join(explain(error, known=known).split())) from None


def setting(overrides: Sequence[str], key: str) -> str | None:
    """Return the override that sets a key, as it was written."""
    parsed = OverridesParser.create().parse_overrides([*overrides])
    return next((str(override.input_line) for override in parsed if override.key_or_group == key), None)


def checked(config: Config) -> Config:
    """Return a configuration made in Python with its paths written from the root, checked like a composed one.

    Raises:
        ValueError: a group has no option, a value is of the wrong kind, or cannot be used.
    """
    missing = [option.name for option in dataclasses.fields(Config) if _is_missing(getattr(config, option.name))]
    if missing:
        raise ValueError(
            f"Config: {', '.join(missing)} has no option; begin from rotexp.load_config([...]), which fills every "
            f"group, and change that by dataclasses.replace"
        )
    try:
        return to_config(writable(config), typed=config.plugins)
    except REFUSALS as error:
        raise ValueError(" ".join(explain(error).split())) from None


def _is_missing(group: object) -> bool:
    return MISSING in (group, getattr(group, "name", ""))


def _checked(overrides: Sequence[str], known: Vocabulary) -> list[str]:
    """Return overrides that one run can have.

    Raises:
        ValueError: they are no list of texts, flags, several values of one key, or Hydra's own.
    """
    if not isinstance(overrides, (list, tuple)) or not all(isinstance(line, str) for line in overrides):
        raise ValueError(f'{overrides!r}: overrides are a list of texts; write ["key=value", "group=option"]')
    lines = [*overrides]
    if flags := [line for line in lines if line.startswith("-")]:
        raise ValueError(f"{flags[0]}: flags are the command's, and so are sweeps; use python -m rotexp.train")
    for override in OverridesParser.create().parse_overrides(lines):
        line, key = str(override.input_line), override.key_or_group
        if override.is_sweep_override():
            raise ValueError(
                f"{line}: several values are a sweep; start python -m rotexp.train -m {line}, or call once a value"
            )
        if override.is_hydra_override() and key not in OF_HYDRA:
            raise ValueError(f"{line}: concerns the command alone; from Python set one of {', '.join(OF_HYDRA)}")
    check_overrides(lines, sweep=False, known=known)
    return lines


def path_of(value: str | Path, *, key: str) -> Path:
    """Return a path from the root.

    Raises:
        ValueError: it is neither a text nor a path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{key}={value!r}: is a {type(value).__name__}; give a path, or its text")
    return Path(value).absolute()


def _primary(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose a primary config.

    Raises:
        ValueError: there is none of this name.
    """
    try:
        return hydra.compose(str(config_name).removesuffix(".yaml"), overrides, return_hydra_config=True)
    except MissingConfigException as error:
        if str(error.missing_cfg_file).removesuffix(".yaml") != str(config_name).removesuffix(".yaml"):
            raise  # another, which this one or an override names
        raise ValueError(f"config_name={config_name}: no such config; name one of rotexp's or in config_dir") from None


def _folder(config_dir: str | Path) -> Path:
    folder = path_of(config_dir, key="config_dir")
    if not folder.is_dir():
        raise ValueError(f"config_dir={config_dir}: no such folder; name the folder that holds your configs")
    return folder


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Let Hydra be set up anew inside the block, and give an application's own Hydra its state back after it."""
    Plugins.instance()  # which stores the options of plug-ins: once, and to stay
    store, application, job = ConfigStore.instance(), GlobalHydra.instance(), JobRuntime.instance()
    before = store.repo, application.hydra, job.conf, BaseContainer._resolvers
    store.repo, job.conf = copy.deepcopy(store.repo), copy.deepcopy(job.conf)
    BaseContainer._resolvers = dict(before[-1])
    application.clear()
    try:
        yield
    finally:
        store.repo, application.hydra, job.conf, BaseContainer._resolvers = before
