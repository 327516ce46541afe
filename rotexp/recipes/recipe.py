"""A recipe: a run that can be made again and what it found, as a YAML file has it, or the folder of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rotexp.errors.requirements import require
from rotexp.files.folders import write_atomically
from rotexp.files.reading import read_yaml
from rotexp.recipes.figures import Value, figures_of, is_value
from rotexp.runfolder.bits import rotations_digest
from rotexp.runfolder.finished_run import FinishedRun, read_finished_run
from rotexp.runfolder.layout import SUMMARY_FILE

FORMAT = 1
NOISE = "numerics.noise_seed"
"""The key by which runs differ by rounding alone, whose spread the tolerances come from."""

KINDS: dict[str, type[Any]] = {
    "name": str,
    "about": str,
    "overrides": list,
    "needs": list,
    "made": dict,
    "texts": dict,
    "model": dict,
    "figures": dict,
    "bits": dict,
}
"""What a file must hold beside `format`; `noise` is left out where no tolerance was measured."""

NAMES: dict[type[Any], str] = {list: "list", dict: "mapping", str: "text"}


@dataclass(frozen=True)
class Figure:
    """What a run found.

    Attributes:
        value: a number, or one for every logged step.
        tolerance: by how much another may differ, in the same unit (None: nobody has measured it).
    """

    value: Value
    tolerance: float | None = None


@dataclass(frozen=True)
class Made:
    """Of what, on what and how a run was made; what is not known is None, or empty.

    Attributes:
        date: YYYY-MM-DD, UTC.
        commit: of rotexp, with `-changed` behind it if files differed.
        machine: processor, instructions, integer units, device, cores.
        versions: of Python and of packages.
        threads: of each rank.
    """

    date: str = ""
    commit: str | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    world_size: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Recipe:
    """A run that can be made again, and what it found.

    Attributes:
        name: of a run's folder, that of the folder.
        source: where it was read.
        run: the finished run; None of a file, whose `overrides` say it instead.
        about: one sentence for people.
        overrides: of `rotexp.train`, complete but for `needs`.
        needs: keys whose values, paths of this machine, are given with the command.
        texts: the digests of the calibration and the evaluation text.
        model: its id, its revision and the digest of its weights.
        noise: how tolerances were measured; empty where they were not.
        rotations: the digest of the rotations' bits.
    """

    name: str
    source: Path
    run: FinishedRun | None = None
    about: str = ""
    overrides: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    made: Made = field(default_factory=Made)
    texts: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    noise: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    rotations: str = ""

    @property
    def values(self) -> dict[str, Value]:
        """What was found, by the names of figures."""
        return {name: figure.value for name, figure in self.figures.items()}

    @property
    def measured(self) -> bool:
        """Whether it states by how much a run may differ."""
        return any(figure.tolerance is not None for figure in self.figures.values())


def read_recipe(place: Path) -> Recipe:
    """Read a recipe: a YAML file, or the folder of a finished run.

    Raises:
        ValueError: there is none, it is damaged, of another format, or the run is not done.
    """
    if place.is_dir():
        return recipe_of(read_finished_run(place, key=None))
    if not place.is_file():
        raise ValueError(f"{place}: is neither a folder nor a file; name a finished run's folder, or a recipe's file")
    return _of_file(place)


def recipe_of(run: FinishedRun) -> Recipe:
    """Return a finished run as a recipe, without tolerances.

    Raises:
        ValueError: its summary lacks figures or digests.
    """
    summary, protocol = run.summary, run.protocol
    machine, time = ({**_mapping(summary.get(key))} for key in ("machine", "time"))
    written = datetime.fromtimestamp((run.folder / SUMMARY_FILE).stat().st_mtime, UTC)
    return Recipe(
        name=run.folder.resolve().name,
        source=run.folder,
        run=run,
        made=Made(
            date=f"{written:%Y-%m-%d}",
            threads=machine.pop("threads", run.config.launch.threads),
            machine=machine,
            versions=_mapping(summary.get("versions")),
            world_size=summary.get("world_size"),
            seconds=round(sum(time.values()), 1) or None,
        ),
        texts={"calibration": protocol["calibration_digest"], "evaluation": str(protocol.get("text_digest"))},
        model={key: _mapping(summary.get("model")).get(key) for key in ("id", "revision", "digest")},
        figures={name: Figure(value) for name, value in figures_of(run).items()},
        rotations=rotations_digest(run.rotations),
    )


def write_recipe(target: Path, recipe: Recipe) -> None:
    """Write a recipe as YAML, whole or not at all; `read_recipe` reads numbers back to the same bits.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(target, as_yaml(recipe))


def as_yaml(recipe: Recipe) -> str:
    """Return the text of a recipe's file."""
    noise = {"noise": dict(recipe.noise)} if recipe.noise else {}
    content = {
        "format": FORMAT,
        "name": recipe.name,
        "about": recipe.about,
        "overrides": [*recipe.overrides],
        "needs": [*recipe.needs],
        "made": {key: _plain(value) for key, value in asdict(recipe.made).items()},
        "texts": dict(recipe.texts),
        "model": dict(recipe.model),
        **noise,
        "figures": {name: _written(figure) for name, figure in recipe.figures.items()},
        "bits": {"rotations": recipe.rotations},
    }
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=118)
    return text


def _written(figure: Figure) -> dict[str, Any]:
    tolerance = {} if figure.tolerance is None else {"tolerance": figure.tolerance}
    return {"value": _plain(figure.value), **tolerance}


def _plain(value: Any) -> Any:
    """Return a value as YAML has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [*value] if isinstance(value, tuple) else value


def _of_file(file: Path) -> Recipe:
    """Read a recipe's file.

    Raises:
        ValueError: it is damaged, no recipe, or of another format.
    """
    content = read_yaml(file)
    if "format" not in content:
        raise ValueError(f"{file}: is no recipe (it says no format); name a file of recipes/, or a run's folder")
    found = content["format"]
    require(found == FORMAT, f"{file}: format", found, f"{FORMAT}", "read it with the rotexp that wrote it")
    for key, kind in KINDS.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{file}: is no recipe ({key} is missing, or no {NAMES[kind]}); write it again")
    if wrong := [line for key in ("overrides", "needs") for line in content[key] if not isinstance(line, str)]:
        raise ValueError(f"{file}: is no recipe ({wrong[0]} is no text of overrides or needs); write it again")
    return Recipe(
        name=content["name"],
        source=file,
        about=content["about"],
        overrides=tuple(content["overrides"]),
        needs=tuple(content["needs"]),
        made=_made(file, content["made"]),
        texts=content["texts"],
        model=content["model"],
        noise=_mapping(content.get("noise")),
        figures={name: _figure(file, name, said) for name, said in content["figures"].items()},
        rotations=str(content["bits"].get("rotations", "")),
    )


def _made(file: Path, said: Mapping[str, Any]) -> Made:
    known = asdict(Made())
    if unknown := sorted({*said} - {*known}):
        raise ValueError(f"{file}: made: {unknown[0]} is unknown; it has {', '.join(known)}; correct it")
    for key in ("machine", "versions"):
        if not isinstance(said.get(key, {}), Mapping):
            raise ValueError(f"{file}: made: {key} is no mapping; write it again")
    return Made(**said)


def _figure(file: Path, name: str, said: Any) -> Figure:
    held = _mapping(said)
    value, tolerance = held.get("value"), held.get("tolerance")
    value = tuple(value) if isinstance(value, list) else value
    if value is None or not is_value(value) or isinstance(tolerance, list) or not is_value(tolerance or 0.0):
        raise ValueError(f"{file}: figures: {name} holds no value, or no tolerance, that is a number; write it again")
    return Figure(value, tolerance)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
