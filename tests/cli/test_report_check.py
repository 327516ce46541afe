"""Runs of a recipe are found, and one figure that moved is one line and exit code 1."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from run_train import run_train

from rotexp.recipes.recipe import Figure, Recipe, recipe_of, write_recipe
from rotexp.recipes.request import overrides_of
from rotexp.runfolder.bits import rotations_digest
from rotexp.runfolder.finished_run import read_finished_run

pytestmark = pytest.mark.slow
FIGURE = "evaluation.trained.perplexity"


@dataclass(frozen=True)
class Ended:
    """A finished report."""

    code: int
    output: str
    lines: list[str]

    def rows(self, recipe: str) -> list[list[str]]:
        """Return the cells of a recipe's rows."""
        rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in self.output.splitlines())
        return [cells[1:] for cells in rows if cells[0] == recipe]


def check(place: Path, runs: Path) -> Ended:
    command = [sys.executable, "-m", "rotexp.report", str(runs), "--check", str(place)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return Ended(ended.returncode, ended.stdout, ended.stderr.splitlines())


def as_recipe(folder: Path, *, name: str) -> Recipe:
    """The recipe of a run as a file has it."""
    run = read_finished_run(folder)
    overrides, needs = overrides_of(run.config)
    return replace(recipe_of(run), name=name, run=None, overrides=tuple(overrides), needs=tuple(needs))


def moved(recipe: Recipe, *, by: float, tolerance: float | None = None) -> Recipe:
    """A recipe with another value of one figure."""
    value = recipe.figures[FIGURE].value
    assert isinstance(value, float)
    return replace(recipe, figures={**recipe.figures, FIGURE: Figure(value + by, tolerance)})


@pytest.fixture(scope="module")
def runs(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank and one on two under exact numerics, one under fast."""
    folder = tmp_path_factory.mktemp("check") / "runs"
    for name, overrides in (
        ("one", ["numerics=exact"]),
        ("two", ["numerics=exact", "sharding=full", "sync_mode=universal"]),
        ("fast", ["numerics=fast", "train.micro_batch_size=1"]),
    ):
        ended = run_train(folder / name, *small, "tracker=jsonl", *overrides)
        assert (ended.code, ended.errors) == (0, "")
    return folder


@pytest.fixture
def place(runs: Path) -> Path:
    """A folder of recipes: that of the runs under exact numerics."""
    folder = runs.parent / "recipes"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_recipe(folder / "exact.yaml", as_recipe(runs / "one", name="exact"))
    return folder


def test_a_summary_says_the_digest_of_the_rotations(runs: Path) -> None:
    said = [
        json.loads((runs / name / "summary.json").read_text())["rotations_digest"] for name in ("one", "two", "fast")
    ]
    assert said == [rotations_digest(runs / name / "rotations.safetensors") for name in ("one", "two", "fast")]
    assert said[0] == said[1]


def test_runs_of_every_spread_are_of_an_exact_recipe(runs: Path, place: Path) -> None:
    ended = check(place, runs)
    assert (ended.code, ended.lines) == (0, [])
    figures = str(len(yaml.safe_load((place / "exact.yaml").read_text())["figures"]))
    assert ended.rows("exact") == [[name, figures, "0", "0", "holds"] for name in ("one", "two")]
    letters = {name: cells[1] for name in ("one", "two", "fast") for cells in ended.rows(name)[:1]}
    assert letters == {"one": "A", "two": "A", "fast": ""}


def test_a_finished_run_is_a_recipe_for_the_others(runs: Path) -> None:
    ended = check(runs / "two", runs)
    assert (ended.code, ended.lines) == (0, [])
    assert [cells[0] for cells in ended.rows("two") if len(cells) == 5] == ["one"]


def test_one_figure_that_moved_is_one_line(runs: Path, place: Path) -> None:
    recipe = moved(as_recipe(runs / "fast", name="fast"), by=1e-3)
    write_recipe(place / "fast.yaml", recipe)
    ended = check(place, runs)
    assert ended.code == 1
    (line,) = ended.lines
    assert line.startswith(f"rotexp: recipe fast: run fast: {FIGURE} moved from ")
    assert line.endswith("by 1.0e-03; no tolerance was measured")
    assert [row[-2:] for row in ended.rows("exact")] == [["0", "holds"]] * 2
    assert [row[-2:] for row in ended.rows("fast") if len(row) == 5] == [["1", "does not hold"]]
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert f"run fast: {FIGURE} moved from " in page


@pytest.mark.parametrize(("tolerance", "code"), [(2e-3, 0), (5e-4, 1)])
def test_a_tolerance_decides_where_bits_are_not_expected(runs: Path, place: Path, tolerance: float, code: int) -> None:
    write_recipe(place / "fast.yaml", moved(as_recipe(runs / "fast", name="fast"), by=1e-3, tolerance=tolerance))
    ended = check(place / "fast.yaml", runs)
    assert ended.code == code
    assert len(ended.lines) == code
    (row,) = [row for row in ended.rows("fast") if len(row) == 5]
    assert row[2:4] == [str(1 - code), str(code)]


def test_equal_bits_are_expected_of_exact_runs_on_the_same_machine(runs: Path, place: Path) -> None:
    recipe = moved(as_recipe(runs / "one", name="exact"), by=1e-3, tolerance=2e-3)
    write_recipe(place / "exact.yaml", recipe)
    ended = check(place, runs)
    assert ended.code == 1
    assert len(ended.lines) == 2
    assert all(line.endswith("equal bits are expected here") for line in ended.lines)
    others = {"versions": {**recipe.made.versions, "torch": "2.0.0"}, "machine": {**recipe.made.machine, "cpu": "x"}}
    for fact, other in {**others, "threads": 2}.items():
        write_recipe(place / "exact.yaml", replace(recipe, made=replace(recipe.made, **{fact: other})))
        ended = check(place, runs)
        assert (ended.code, ended.lines) == (0, [])
        assert [row[2] for row in ended.rows("exact")] == ["1", "1"]


@pytest.mark.parametrize("key", ["train.steps", "the evaluation text"])
def test_a_recipe_without_a_run_does_not_hold(runs: Path, place: Path, key: str) -> None:
    recipe = as_recipe(runs / "one", name="exact")
    if key == "train.steps":
        recipe = replace(recipe, overrides=tuple(line.replace("steps=2", "steps=3") for line in recipe.overrides))
    else:
        recipe = replace(recipe, texts={**recipe.texts, "evaluation": "0" * 16})
    write_recipe(place / "exact.yaml", recipe)
    ended = check(place, runs)
    assert ended.code == 1
    assert ended.lines == [f"rotexp: recipe exact: no finished run of it is here; one, the nearest, differs in {key}"]
    assert ended.rows("exact") == [["", "0", "0", "0", "no run"]]


def test_an_older_run_had_the_defaults_of_keys_that_it_does_not_say(runs: Path, place: Path, tmp_path: Path) -> None:
    older = shutil.copytree(runs / "fast", tmp_path / "runs" / "older")
    config = yaml.safe_load((older / "config.resolved.yaml").read_text())
    del config["numerics"]
    (older / "config.resolved.yaml").write_text(yaml.safe_dump(config))
    write_recipe(place / "fast.yaml", as_recipe(runs / "fast", name="fast"))
    assert check(place / "fast.yaml", older.parent).code == 0
    assert check(place / "exact.yaml", older.parent).code == 1


def test_a_run_that_lost_its_rotations_cannot_be_compared(runs: Path, place: Path, tmp_path: Path) -> None:
    lost = shutil.copytree(runs / "one", tmp_path / "runs" / "lost")
    (lost / "rotations.safetensors").unlink()
    ended = check(place, lost.parent)
    assert ended.code == 1
    assert ended.lines[0].startswith("rotexp: recipe exact: run lost cannot be compared: ")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "is neither a folder nor a file"),
        ("format: 7\n", "format"),
        ("overrides: [train.stepps=1]", "train.stepps"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_one_line_and_writes_nothing(
    runs: Path, place: Path, tmp_path: Path, content: str | None, line: str
) -> None:
    file = place / "wrong.yaml"
    if content and content.startswith("overrides"):
        write_recipe(file, replace(as_recipe(runs / "one", name="wrong"), overrides=("train.stepps=1",)))
    elif content:
        file.write_text(content)
    shutil.copytree(runs / "one", tmp_path / "runs" / "one")
    ended = check(file, tmp_path / "runs")
    assert (ended.code, ended.output, len(ended.lines)) == (2, "", 1)
    assert line in ended.lines[0]
    assert not (tmp_path / "runs" / "report.html").exists()


def test_a_folder_without_recipes_is_refused(runs: Path, tmp_path: Path) -> None:
    ended = check(tmp_path, runs)
    said = f"rotexp: --check {tmp_path}: holds no recipe (a .yaml file); name one, or a folder of them"
    assert (ended.code, ended.output, ended.lines) == (2, "", [said])
