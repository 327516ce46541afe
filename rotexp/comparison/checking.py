"""Whether runs find what recipes say: which of them are a recipe's, and how their figures compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rotexp.comparison.checks import Check
from rotexp.comparison.computing import deciding, is_exact
from rotexp.comparison.reading import dig
from rotexp.comparison.runs import Run, flatten
from rotexp.config.composition import differences, to_plain
from rotexp.errors.wording import few_faults
from rotexp.face.configs import load_config
from rotexp.recipes.comparing import KIND, VERSIONS, Compared, Comparison, Verdict, compare, differing
from rotexp.recipes.recipe import Recipe, read_recipe, recipe_of
from rotexp.runfolder.finished_run import FinishedRun, read_config
from rotexp.runfolder.layout import SUMMARY_FILE

TEXTS = {"calibration": "calibration_digest", "evaluation": "text_digest"}
"""What a recipe calls a text, and the protocol of a run its digest."""


def check_recipes(place: Path, runs: Sequence[Run]) -> list[Check]:
    """Compare the figures of recipes with those of every finished run of each.

    Args:
        place: a recipe's file, a folder of such, or a finished run.

    Raises:
        ValueError: there is no recipe, or one that cannot be read or composed.
    """
    recipes = [read_recipe(file) for file in files_at(place)]
    done = [run for run in runs if run.status == "done" and run.folder != place.resolve()]
    usual = flatten(to_plain(load_config()))
    return [check for recipe in recipes for check in _of_recipe(recipe, done, usual)]


def files_at(place: Path) -> list[Path]:
    """Return where recipes lie: at a place itself, or in a folder that is no run's.

    Raises:
        ValueError: the folder holds none.
    """
    if not place.is_dir() or (place / SUMMARY_FILE).is_file():
        return [place]
    if not (found := sorted(place.glob("*.yaml"))):
        raise ValueError(f"--check {place}: holds no recipe (a .yaml file); name one, or a folder of them")
    return found


def _of_recipe(recipe: Recipe, runs: Sequence[Run], usual: Mapping[str, Any]) -> list[Check]:
    """Return a check a run of the recipe, or one that says that there is none."""
    wanted = wanted_by(recipe)
    keys = {run.name: apart(run, recipe, wanted, usual) for run in runs}
    if found := [_checked(recipe, run) for run in runs if not keys[run.name]]:
        return found
    nearest = min(keys, key=lambda name: len(keys[name]), default=None)
    hint = "" if nearest is None else f"; {nearest}, the nearest, differs in {few_faults(keys[nearest])}"
    return [Check(recipe.name, faults=[f"no finished run of it is here{hint}"])]


def wanted_by(recipe: Recipe) -> dict[str, Any]:
    """Return the configuration of a recipe by dotted keys, but for the paths that it needs.

    Raises:
        ValueError: it cannot be composed by this version.
    """
    try:
        given = [f"{need}={need}" for need in recipe.needs]  # as paths, each another
        config = recipe.run.config if recipe.run else load_config([*recipe.overrides, *given])
    except ValueError as error:
        raise ValueError(f"{recipe.source}: overrides: {error}") from None
    return {key: value for key, value in flatten(to_plain(config)).items() if key not in recipe.needs}


def apart(run: Run, recipe: Recipe, wanted: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """Return in what a run is not that of a recipe: keys that decide what is computed, and texts; nothing if it is.

    Args:
        usual: the default configuration, which a run had of keys that are younger than it.
    """
    given = {key: value for key, value in run.config.items() if key not in recipe.needs}
    younger = {key: usual[key] for key in wanted if key not in given and key in usual}
    exact = is_exact(wanted)
    keys = list(differences(deciding(wanted, exact=exact), deciding(given | younger, exact=exact)))
    digests = {text: dig(run.summary, "evaluation", "protocol", key) for text, key in TEXTS.items()}
    return keys + [f"the {text} text" for text, digest in digests.items() if digest != recipe.texts.get(text, digest)]


def _checked(recipe: Recipe, run: Run) -> Check:
    try:
        now = recipe_of(FinishedRun(run.folder, read_config(run.folder), run.summary))
    except ValueError as error:
        return Check(recipe.name, run.name, faults=[f"run {run.name} cannot be compared: {error}"])
    found = compare(recipe, now, bits_expected=is_exact(run.config) and _made_alike(recipe, now, run))
    equal, within, moved = map(found.count, (Verdict.equal, Verdict.within, Verdict.differs))
    return Check(recipe.name, run.name, equal, within, moved, [f"run {run.name}: {line}" for line in _faults(found)])


def _made_alike(recipe: Recipe, now: Recipe, run: Run) -> bool:
    """Return whether nothing that may change bits differs: versions, kind of machine, a chosen number of threads."""
    chosen = {} if (threads := run.config.get("launch.threads")) is None else {"threads": threads}
    others = (
        *differing(recipe.made.versions, now.made.versions, VERSIONS),
        *differing(recipe.made.machine, now.made.machine, KIND),
        *differing({"threads": recipe.made.threads}, chosen, [*chosen]),
    )
    return not others


def _faults(found: Comparison) -> Iterator[str]:
    """Yield a line for everything of which a comparison does not hold."""
    if found.holds:
        return
    for figure in found.figures:
        if figure.verdict is Verdict.differs or (found.bits_expected and figure.difference):
            yield _moved(figure, bits_expected=found.bits_expected)
    for name, (before, now) in found.digests.items():
        if before != now and (found.bits_expected or not found.same_weights):
            yield f"{name} differ: {before[:16]} in the recipe, now {now[:16]}"


def _moved(figure: Compared, *, bits_expected: bool) -> str:
    if figure.now is None:
        return f"{figure.name} is missing"
    values = "" if isinstance(figure.before, tuple) else f" from {figure.before!r} to {figure.now!r},"
    allowed = "no tolerance was measured" if figure.tolerance is None else f"the tolerance is {figure.tolerance:.1e}"
    reason = "equal bits are expected here" if bits_expected else allowed
    return f"{figure.name} moved{values} by {figure.difference:.1e}; {reason}"
