"""Make a recipe's run again and say which figures hold; or write a finished run as a recipe, tolerances measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rotexp.config.plugins import granting
from rotexp.config.schema import Config
from rotexp.errors.requirements import require
from rotexp.face.run import RunError, run
from rotexp.process.exit_codes import DONE, FAILED, WRONG_REQUEST
from rotexp.process.imports import uncollected
from rotexp.process.outer import adopt
from rotexp.process.saying import say
from rotexp.recipes.comparing import KIND, VERSIONS, compare, differing
from rotexp.recipes.origin import commit_of
from rotexp.recipes.recipe import NOISE, Made, Recipe, read_recipe, recipe_of, write_recipe
from rotexp.recipes.request import Request, overrides_of, to_request
from rotexp.recipes.showing import show_comparison, show_differing
from rotexp.recipes.tolerances import with_tolerances
from rotexp.runfolder.finished_run import read_finished_run

TEXTS = ("calibration", "evaluation")


def reproduce(place: Path, given: Sequence[str]) -> int:
    """Make a recipe's run again, print how it compares, and return the exit code: 1 if figures do not hold.

    Args:
        place: a finished run's folder, or a recipe's file.
        given: overrides beside it.

    Raises:
        ValueError: the request is wrong, or texts or model are others; nothing was started then.
    """
    _check_process()
    request = to_request(place, given)
    rows = look(request)
    show_differing(rows)
    found = made_again(request)
    if isinstance(found, int):
        return found
    exact, made = request.config.numerics.exact, request.recipe.made
    alike = exact and request.config.launch.threads in (None, made.threads)
    if line := spread_line(made, found.made, exact=alike):
        say(line)
    compared = compare(request.recipe, found, bits_expected=exact and not rows)
    show_comparison(request.recipe, compared)
    return DONE if compared.holds else FAILED


def write(place: Path, target: Path, given: Sequence[str], *, noise: int, about: str | None = None) -> int:
    """Write a finished run as a recipe, and return the exit code.

    Args:
        place: the run's folder.
        target: the YAML file; another recipe there is replaced.
        given: overrides of the runs under noise.
        noise: how many of them are made to measure tolerances by.
        about: one sentence for people (None: that of the recipe that is replaced).

    Raises:
        ValueError: the request is wrong; nothing was started or written then.
    """
    _check_process()
    require(noise >= 0, "--noise", noise, "0 or more", "leave it out, and no tolerance is stated")
    about = _about(target, about)
    request = to_request(place, given)
    recipe = request.recipe
    if recipe.run is None:
        raise ValueError(f"{place}: is a recipe already; --write takes the folder of a finished run")
    overrides, needs = overrides_of(recipe.run.config)
    requests = [to_request(place, given, noise_seed=seed) for seed in range(1, noise + 1)]
    others: list[Recipe] = []
    for number, noisy in enumerate(requests, start=1):
        found = made_again(replace(noisy, folder=request.folder / f"noise-{number}"))
        if isinstance(found, int):
            return found
        others.append(found)
    model = dict(recipe.model)
    if "model.path" in needs:
        model["id"] = Path(str(model["id"])).name
    written = replace(
        recipe,
        name=target.stem,
        about=about,
        overrides=tuple(overrides),
        needs=tuple(needs),
        made=replace(recipe.made, commit=commit_of()),
        model=model,
        noise={"seeds": noise, "of": NOISE} if noise else {},
        figures=with_tolerances(recipe.figures, [other.values for other in others]),
    )
    write_recipe(target, written)
    say(f"wrote {target}")
    return DONE


def look(request: Request) -> list[tuple[str, str, str]]:
    """Return what is not as it was when a recipe was made: versions, the kind of machine, the threads that were chosen.

    Raises:
        ValueError: texts or model are not the recipe's.
    """
    with uncollected():
        from rotexp.tracking.machine import machine
        from rotexp.tracking.summary import versions

    recipe, config = request.recipe, request.config
    with granting(config.plugins):
        _check_model(recipe, config)
        _check_texts(recipe, config)
    before = recipe.made
    threads = (
        {"threads": config.launch.threads} if config.launch.threads else {}
    )  # else a run proves they do not matter
    return [
        *differing(before.versions, versions(), VERSIONS),
        *differing(before.machine, machine(), KIND),
        *differing({"threads": before.threads}, threads, [*threads]),
    ]


def _check_model(recipe: Recipe, config: Config) -> None:
    """Refuse another model, as far as its name tells; that its weights are others is found by their digest."""
    from rotexp.models.load import open_structure

    identity, known = open_structure(config.model).identity, recipe.model.get("id")
    require(known in (None, identity, Path(identity).name), "model", identity, f"{known}, the recipe's", "name that")


def _check_texts(recipe: Recipe, config: Config) -> None:
    """Refuse other texts than the recipe's, by their digests."""
    from rotexp.data.corpora import text_digest
    from rotexp.experiment.inputs import read_corpus

    corpus, _ = read_corpus(config.data)
    for name in TEXTS:
        found, path, known = text_digest(getattr(corpus, name)), getattr(config.data, name), recipe.texts.get(name)
        where = f"data={config.data.name}" if path is None else f"data.{name}={path}"
        if known not in (None, found):
            python = recipe.made.versions.get("python", "unknown")
            raise ValueError(
                f"{where}: the {name} text has the digest {found}, and the recipe's, of Python {python}, has {known}; "
                f"give that very text"
            )


def made_again(request: Request) -> Recipe | int:
    """Make a run; return what it found, or the exit code of one that has said itself what was wrong."""
    try:
        folder = run(request.config, folder=request.folder).folder
    except RunError:
        return FAILED
    except ValueError:
        return WRONG_REQUEST
    with granting(request.config.plugins):
        return recipe_of(read_finished_run(folder, key=None))


def spread_line(before: Made, now: Made, *, exact: bool) -> str:
    """Return in words how a run was spread otherwise than the recipe's; nothing where it was not.

    Args:
        exact: whether that may change no bit.
    """
    if (before.world_size, before.threads) == (now.world_size, now.threads):
        return ""
    said = "changes no bit under numerics=exact" if exact else "changes rounding, which training amplifies"
    spreads = [f"{made.world_size} x {made.threads}" for made in (before, now)]
    return f"ranks x threads were {spreads[0]}, and are {spreads[1]}: that {said}"


def _check_process() -> None:
    """Refuse to work as a rank: the run starts its own."""
    if adopt() is not None:
        raise ValueError("rotexp.reproduce: torchrun or srun started this process as a rank; start it once, by itself")


def _about(target: Path, about: str | None) -> str:
    """Return the sentence of a recipe that is going to be written.

    Raises:
        ValueError: it has no place, or would replace something else.
    """
    require(target.suffix == ".yaml", "--write", target, "a .yaml file", "name it so")
    require(target.parent.is_dir(), "--write", target, "in a folder that is there", f"make {target.parent} first")
    replaced = read_recipe(target) if target.exists() else None
    return about if about is not None else replaced.about if replaced is not None else ""
