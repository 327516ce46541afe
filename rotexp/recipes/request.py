"""What a recipe asks for: its configuration with what was given beside it; and which overrides say a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rotexp.config.composition import RECORDED_PATHS, differences, to_config, to_plain
from rotexp.config.explanations import TRAINING
from rotexp.config.own_parts import gathered, spread, writable
from rotexp.config.plugins import KEY as PLUGINS
from rotexp.config.schema import RECORDING, Config
from rotexp.errors.requirements import require
from rotexp.face.configs import OF_HYDRA, composed
from rotexp.files.reading import read_yaml
from rotexp.recipes.recipe import NOISE, Recipe, read_recipe

SPREAD = ("sharding", "sync_mode", "launch", "tracker")
"""Groups that say how a run is spread over ranks and recorded."""
BESIDE = (*RECORDED_PATHS, "profile", "train.checkpoint_every", PLUGINS, *OF_HYDRA)
"""What else may be given: where things lie, and what changes no figure."""

HEADS = ("name", "strategy", "mode", "kind")
"""Keys by which a group's option says which it is."""
UNSAID = (*(key for key in RECORDING if key != "launch.threads"), "evaluation.share_rows")
"""Beginnings of keys that a recipe leaves out: they change nothing of what a run of its own computes."""
UNQUOTED = re.compile(r"(?!(?:null|true|false|nan|inf)$)[a-z_][\w./-]*", re.IGNORECASE)
"""A text that Hydra reads as it is."""


@dataclass(frozen=True)
class Request:
    """A recipe, the configuration that runs it here, and the folder of that run."""

    recipe: Recipe
    config: Config
    folder: Path


def to_request(place: Path, given: Sequence[str], *, noise_seed: int | None = None) -> Request:
    """Read a recipe and compose what runs it here; rows are measured, and never taken over.

    Args:
        given: overrides beside it, of where texts lie and how the run is spread.
        noise_seed: by which the run is to differ from the recipe's in rounding (None: not at all).

    Raises:
        ValueError: there is no recipe, it says what a file may not, something that it needs is not given, or what is
            given is the recipe's own or cannot be used.
    """
    _check_given(given)
    lines = [*given, *([] if noise_seed is None else [f"{NOISE}={noise_seed}"])]
    with composed(lines) as composition:  # which grants the plug-ins that were typed
        recipe = read_recipe(place)
        if recipe.run is not None:
            whole = _changed(recipe.run.config, composition.config, lines)
            return Request(recipe, _alone(to_config(whole)), composition.folder)
    _check_recipe(recipe, given)
    kept = [line for line in recipe.overrides if key_of(line) not in map(key_of, lines)]
    with composed([*kept, *lines]) as composition:
        return Request(recipe, _alone(to_config(composition.config)), composition.folder)


def key_of(override: str) -> str:
    """Return the key, or the group, that an override sets."""
    return override.partition("=")[0].strip().lstrip("+~").strip()


def _check_given(given: Sequence[str]) -> None:
    """Refuse overrides by which the run would be another than the recipe's."""
    for line in given:
        key = key_of(line)
        if key not in (*SPREAD, *BESIDE) and not key.startswith(tuple(f"{group}." for group in SPREAD)):
            raise ValueError(
                f"{line}: is the recipe's to say; what may be given is how the run is spread and recorded "
                f"({', '.join(SPREAD)}) and where things lie ({', '.join((*RECORDED_PATHS, *OF_HYDRA))}); leave it out"
            )


def _check_recipe(recipe: Recipe, given: Sequence[str]) -> None:
    """Refuse a file that says what is imported or where a run is written, and one whose needs are not given."""
    for line in recipe.overrides:
        if key_of(line) == PLUGINS or key_of(line).startswith("hydra"):
            raise ValueError(
                f"{recipe.source}: overrides: {line}: is none that a file may say; take it out, and type it if it is "
                f"yours"
            )
    missing = [need for need in recipe.needs if need not in map(key_of, given)]
    if missing:
        shown = " ".join(f"{need}=PATH" for need in missing)
        raise ValueError(f"{recipe.source}: needs {', '.join(missing)}, paths of this machine; add {shown}")


def _changed(config: Config, composition: DictConfig, lines: Sequence[str]) -> DictConfig:
    """Return a run's configuration with what overrides set in a composition; of a group all that its option says."""
    whole = writable(config)
    for key in dict.fromkeys(map(key_of, lines)):
        if key not in (PLUGINS, *OF_HYDRA):
            OmegaConf.update(whole, key, OmegaConf.select(composition, key), merge=False, force_add=True)
    return whole


def _alone(config: Config) -> Config:
    """Return a configuration of a run that measures all of its rows itself, on this machine.

    Raises:
        ValueError: it is of several nodes.
    """
    nodes = config.launch.nnodes
    require(nodes == 1, "launch.nnodes", nodes, "1 where a recipe is made again", "set launch.nnodes=1")
    return replace(config, evaluation=replace(config.evaluation, share_rows=False))


def overrides_of(config: Config) -> tuple[list[str], list[str]]:
    """Return overrides of `rotexp.train` that say a configuration, and the keys that must be given beside them.

    The latter hold paths of this machine. What changes no figure of a run of its own is left out.

    Raises:
        ValueError: overrides cannot say it, as where parts are the user's own.
    """
    plain = to_plain(config)
    values = _flat(plain)
    needs = [key for key in RECORDED_PATHS if Path(str(values.get(key) or "")).is_absolute()]
    lines = _options(plain)
    lines += [f"{key}={_written(values.get(key))}" for key in _left(lines, plain, needs)]
    if unsaid := _left(lines, plain, needs):
        raise ValueError(
            f"{', '.join(unsaid)}: overrides cannot say what the run had; its folder is the recipe: reproduce that"
        )
    return lines, needs


def _left(lines: Sequence[str], plain: Mapping[str, Any], needs: Sequence[str]) -> list[str]:
    """Return the keys whose values some overrides do not say."""
    found = differences(_composed_plain(lines), plain)
    return [key for key in found if key not in needs and not key.startswith(UNSAID)]


def _composed_plain(lines: Sequence[str]) -> dict[str, Any]:
    """Return what overrides compose to as plain values, as far as they say it."""
    with composed(lines) as composition:
        plain = OmegaConf.to_container(gathered(composition.config), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {key: value for key, value in spread(plain).items() if key != PLUGINS}


def _options(plain: Mapping[str, Any]) -> list[str]:
    """Return the overrides that choose an option of each group, where it is not the default one."""
    default = _composed_plain([])
    chosen = {group: (_option(group, plain), _option(group, default)) for group in TRAINING.groups if group in plain}
    return [f"{group}={option}" for group, (option, usual) in chosen.items() if option not in (None, usual)]


def _option(group: str, plain: Mapping[str, Any]) -> str | None:
    """Return the option of a group that a configuration has, None where no option of rotexp's says it, or need not."""
    if f"{group}.".startswith(UNSAID):
        return None
    for option in TRAINING.groups[group]:
        said = read_yaml(Path(str(files("rotexp.conf") / group / f"{option}.yaml")))
        head = next((key for key in HEADS if key in said), "name")
        if said.get(head, option) == plain[group].get(head):  # a schema's part has its option's name
            return option
    return None


def _flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys, nested ones too."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
    return found


def _written(value: Any) -> str:
    """Return a value as Hydra's overrides have it."""
    if isinstance(value, str):
        return value if UNQUOTED.fullmatch(value) else "'{}'".format(value.replace("'", "\\'"))
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
