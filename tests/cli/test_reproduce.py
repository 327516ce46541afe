"""`python -m rotexp.reproduce`: a run made again has equal bits, in another world too; a moved figure is found."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_train import Run, run_train

from rotexp.recipes.recipe import read_recipe

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Ended:
    """A finished command."""

    code: int
    output: str
    errors: str

    @property
    def last(self) -> str:
        return self.output.splitlines()[-1]


def reproduce(*arguments: str | Path, cwd: Path) -> Ended:
    command = [sys.executable, "-m", "rotexp.reproduce", *map(str, arguments)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, timeout=500)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def exact(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run under numerics=exact, on one rank."""
    folder = tmp_path_factory.mktemp("exact") / "run"
    run = run_train(folder, *small, "numerics=exact", "tracker=jsonl", timeout=600)
    assert (run.code, run.errors) == (0, "")
    return run


@pytest.fixture(scope="module")
def file(exact: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a recipe's file, without tolerances."""
    target = tmp_path_factory.mktemp("recipes") / "mine.yaml"
    ended = reproduce(exact.folder, "--write", target, "--about", "Of a test.", cwd=target.parent)
    assert (ended.code, ended.output, ended.errors) == (0, f"wrote {target}\n", "")
    return target


def moved(run: Run, folder: Path) -> Path:
    """Copy a run, one figure of it moved by its last bit."""
    shutil.copytree(run.folder, folder)
    summary = json.loads((folder / "summary.json").read_text())
    row = summary["evaluation"]["trained"]
    row["perplexity"] = math.nextafter(row["perplexity"], math.inf)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_made_again_in_another_world_has_equal_bits_and_a_moved_one_is_found(exact: Run, tmp_path: Path) -> None:
    given = ["sharding=full", "launch.nproc=2", f"hydra.run.dir={tmp_path}/again"]
    ended = reproduce(moved(exact, tmp_path / "moved"), *given, cwd=tmp_path)
    found = read_recipe(exact.folder).figures
    assert (ended.code, ended.errors) == (1, "")
    (line,) = [line for line in ended.output.splitlines() if "differs" in line]
    assert "evaluation.trained.perplexity" in line
    assert ended.last == (
        "not reproduced: equal bits are expected here (numerics=exact), and "
        f"{len(found) - 1} of {len(found)} figures have equal bits"
    )
    assert "ranks x threads were 1 x 1, and are 2 x 1: that changes no bit" in ended.output
    again = read_recipe(tmp_path / "again")
    recipe = read_recipe(exact.folder)
    assert again.values == recipe.values
    assert (again.rotations, again.model) == (recipe.rotations, recipe.model)
    assert again.made.world_size == 2


@pytest.mark.slow
def test_a_file_is_made_again_with_what_it_needs(exact: Run, file: Path, small: list[str], tmp_path: Path) -> None:
    needs = [line for line in small if line.startswith(("model.path=", "data.calibration=", "data.evaluation="))]
    assert read_recipe(file).needs == tuple(line.partition("=")[0] for line in needs)
    assert str(exact.folder.parent) not in file.read_text()
    ended = reproduce(file, *needs, "tracker=jsonl", f"hydra.run.dir={tmp_path}/again", cwd=tmp_path)
    assert (ended.code, ended.errors) == (0, "")
    assert ended.last.startswith("reproduced: all ")
    assert ended.output.startswith("versions, kind of machine, texts and model are the recipe's\n")
    model, calibration, evaluation = (line.partition("=")[2] for line in needs)
    swapped = [f"model.path={model}", f"data.calibration={evaluation}", f"data.evaluation={calibration}"]
    refused = reproduce(file, *swapped, cwd=tmp_path)
    assert (refused.code, refused.output) == (2, "")
    assert refused.errors.startswith("rotexp: data.calibration=")
    assert refused.errors.count("\n") == 1


@pytest.mark.slow
def test_a_model_of_other_weights_is_found(file: Path, small: list[str], checkpoint: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-4] ^= 1  # the lowest bit of the last number
    (other / "model.safetensors").write_bytes(weights)
    texts = [line for line in small if line.startswith(("data.calibration=", "data.evaluation="))]
    given = [f"model.path={other}", *texts, "tracker=jsonl", f"hydra.run.dir={tmp_path}/again"]
    ended = reproduce(file, *given, cwd=tmp_path)
    assert (ended.code, ended.errors) == (1, "")
    assert ended.last == "not reproduced: the model has other weights than the recipe's"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: DIR_OR_FILE; --help shows what is allowed"),
        (["nowhere"], "nowhere: is neither a folder nor a file; name a finished run's folder, or a recipe's file"),
        (["no.yaml"], "no.yaml: is no recipe (it says no format); name a file of recipes/, or a run's folder"),
        (["later.yaml"], "later.yaml: format=2: must be 1; read it with the rotexp that wrote it"),
        (["."], ".: holds no run (summary.json is missing); name the folder of a finished run"),
        (["nowhere", "--noise", "2"], "--noise and --about belong to --write FILE; --help shows what is allowed"),
        (["nowhere", "train.steps=3"], "train.steps=3: is the recipe's to say; what may be given is how"),
        (["nowhere", "--again"], "unrecognized arguments: --again; --help shows what is allowed"),
        (["nowhere", "sharding=ful"], "sharding=ful: no such option; choose one of full,"),
        (["nowhere", "--write", "mine.txt"], "--write=mine.txt: must be a .yaml file; name it so"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(arguments: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "no.yaml").write_text("name: tiny\n")
    (tmp_path / "later.yaml").write_text("format: 2\n")
    before = sorted(tmp_path.rglob("*"))
    ended = reproduce(*arguments, cwd=tmp_path)
    assert (ended.code, ended.output) == (2, "")
    assert ended.errors.startswith(f"rotexp: {reason}")
    assert ended.errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
