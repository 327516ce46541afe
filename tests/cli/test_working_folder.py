"""Paths are relative to where the command was typed, also where Hydra makes the run's folder the working folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_train import Run, run_train

CHDIR = "hydra.job.chdir=true"


@pytest.fixture(scope="module")
def typed_in(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds, by relative names, everything that a command may name."""
    folder = tmp_path_factory.mktemp("typed in")
    given = dict(override.partition("=")[::2] for override in small)
    (folder / "model").symlink_to(given["model.path"])
    for name in ("calibration", "evaluation"):
        (folder / f"{name}.txt").write_text(Path(given[f"data.{name}"]).read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def relative(small: list[str]) -> list[str]:
    """The small run, its files named relative to that folder."""
    named = {"model.path": "model", "data.calibration": "calibration.txt", "data.evaluation": "./evaluation.txt"}
    kept = [override for override in small if override.partition("=")[0] not in named]
    return [*kept, *(f"{key}={value}" for key, value in named.items()), "tracker=jsonl", CHDIR]


@pytest.fixture(scope="module")
def trained(typed_in: Path, relative: list[str]) -> Run:
    run = run_train(Path("out/run"), *relative, cwd=typed_in)
    assert run.code == 0, run.errors
    return Run(typed_in / "out" / "run", 0, run.output, "")


def command(module: str, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", f"rotexp.{module}", *arguments],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "120"},
    )


def test_a_training_reads_what_was_named_and_records_it_from_the_root(trained: Run, typed_in: Path) -> None:
    assert trained.summary["status"] == "done"
    recorded = yaml.safe_load((trained.folder / "config.resolved.yaml").read_text())
    assert Path(recorded["model"]["path"]).is_absolute()
    assert Path(recorded["model"]["path"]).samefile(typed_in / "model")
    assert recorded["data"]["calibration"] == f"{typed_in}/calibration.txt"
    assert recorded["data"]["evaluation"] == f"{typed_in}/evaluation.txt"


def test_a_file_of_rotations_and_a_checkpoint_are_found_too(trained: Run, relative: list[str], typed_in: Path) -> None:
    given = ("rotation.path=out/run/rotations.safetensors", "resume=out/run", "train.steps=3")
    options = [override for override in relative if not override.startswith("train.steps")]
    run = run_train(Path("out/more"), *options, *given, cwd=typed_in)
    assert run.code == 0, run.errors
    assert "resumed from" in run.output
    recorded = yaml.safe_load((typed_in / "out" / "more" / "config.resolved.yaml").read_text())
    assert recorded["rotation"]["path"] == f"{trained.folder}/rotations.safetensors"
    assert recorded["resume"] == str(trained.folder)


def test_an_evaluation_and_an_export_are_of_the_run_that_was_named_and_go_where_they_were_sent(
    trained: Run, typed_in: Path
) -> None:
    aside = (CHDIR, "hydra.run.dir=aside")
    measured = command("evaluate", "run=out/run", "out=figures.json", *aside, cwd=typed_in)
    assert measured.returncode == 0, measured.stderr
    figures = json.loads((typed_in / "figures.json").read_text())
    assert Path(figures["run"]) == trained.folder
    exported = command("export", "run=out/run", "export.path=exported", *aside, cwd=typed_in)
    assert exported.returncode == 0, exported.stderr
    assert (typed_in / "exported" / "config.json").is_file()
    assert not (typed_in / "aside").exists()


def test_the_jobs_of_a_sweep_find_them_too(typed_in: Path, relative: list[str]) -> None:
    options = [override for override in relative if not override.startswith("train.steps")]
    swept = command("train", "-m", "seed=0,1", *options, "train.steps=0", "hydra.sweep.dir=out/sweep", cwd=typed_in)
    assert swept.returncode == 0, swept.stderr
    assert [Run(typed_in / "out" / "sweep" / f"seed-{seed}", 0, "", "").summary["status"] for seed in (0, 1)] == [
        "done",
        "done",
    ]


def test_a_refused_request_leaves_no_folder(typed_in: Path, relative: list[str]) -> None:
    refused = command("train", *relative, "rotation.path=nowhere.bin", "hydra.run.dir=out/refused", cwd=typed_in)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"rotexp: rotation.path={typed_in}/nowhere.bin: no such file; name a rotations.safetensors or R.bin\n"
    )
    assert not (typed_in / "out" / "refused").exists()
