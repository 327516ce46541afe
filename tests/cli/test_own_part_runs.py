"""Runs of the user's own parts: named beside a folder of configs, repeated, resumed, swept, evaluated, refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_train import Run, run_train

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "tests" / "parts"
GEOOPT = ROOT / "examples" / "plugins" / "geoopt_adam"
TYPED = "plugins=[their_parts]"


@pytest.fixture(scope="module")
def options(small: list[str]) -> list[str]:
    return [*(override for override in small if not override.startswith("train.steps")), "tracker=jsonl"]


@pytest.fixture(scope="module")
def text(options: list[str]) -> str:
    return next(option for option in options if option.startswith("data.calibration")).partition("=")[2]


@pytest.fixture(scope="module")
def everything(options: list[str], text: str) -> list[str]:
    """Every kind of part, and weights trained beside the rotations."""
    kept = [option for option in options if not option.startswith(("data.calibration", "data.evaluation", "data=text"))]
    return [
        *kept,
        "data=halves",
        f"data.path={text}",
        "optimizer=heavy_ball",
        "objective=sharpened",
        "train/scheduler=trapezoid",
        "rotation/start=householder",
        "train.warmup_steps=1",
        "train.steps=4",
        "train.checkpoint_every=2",
        "train.params=all",
        "ema.decay=0.5",
    ]


@pytest.fixture(scope="module")
def whole(everything: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended = run_train(folder, "--config-dir", str(PARTS), TYPED, *everything, cwd=PARTS)
    assert ended.code == 0, ended.errors
    return ended


def rotexp(command: str, *arguments: str, cwd: Path = PARTS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"rotexp.{command}", *arguments], check=False, capture_output=True, text=True, cwd=cwd
    )


@pytest.mark.slow
def test_every_kind_of_part_takes_part_in_a_run(whole: Run) -> None:
    rates = [row["train/lr"] for row in whole.steps]
    assert rates == pytest.approx([0.05 * share for share in (0.5, 1.0, 1.0, 0.5)])
    assert whole.summary["train"]["steps"] == 4
    for rotation in whole.rotations.values():
        error = rotation.double() @ rotation.double().mT - torch.eye(len(rotation), dtype=torch.float64)
        assert error.abs().max() < 1e-5


@pytest.mark.slow
def test_a_resumed_run_and_a_repeated_one_end_with_the_same_bits(
    whole: Run, everything: list[str], tmp_path: Path
) -> None:
    """The repeated one from what the run recorded, in another working folder."""
    resume = f"resume={whole.folder / 'checkpoints' / 'step-00000002'}"
    resumed = run_train(tmp_path / "resumed", "--config-dir", str(PARTS), TYPED, *everything, resume, cwd=PARTS)
    assert resumed.code == 0, resumed.errors
    assert f"resumed from {whole.folder}" in resumed.output
    recorded = ("--config-dir", str(whole.folder), "--config-name", "config.resolved")
    again = run_train(tmp_path / "again", *recorded, TYPED, "hydra.job.chdir=true", cwd=PARTS)
    assert again.code == 0, again.errors
    for run in (resumed, again):
        assert [row["train/loss"] for row in run.steps] == [row["train/loss"] for row in whole.steps][-len(run.steps) :]
        assert all(torch.equal(run.rotations[name], rotation) for name, rotation in whole.rotations.items())
    without = run_train(tmp_path / "without", *recorded, cwd=PARTS)
    assert without.code == 2
    assert "type plugins=[their_parts] if it is yours" in without.errors


@pytest.mark.slow
def test_a_finished_run_is_evaluated_and_exported_where_its_parts_are_granted(whole: Run, tmp_path: Path) -> None:
    for command, given in (("evaluate", f"out={tmp_path}/figures.json"), ("export", f"export.path={tmp_path}/model")):
        refused = rotexp(command, f"run={whole.folder}", given)
        assert refused.returncode == 2
        assert "type plugins=[their_parts] if it is yours" in refused.stderr
        online = ["export.online=true"] if command == "export" else []
        done = rotexp(command, f"run={whole.folder}", given, TYPED, *online)
        assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    recorded = whole.summary["evaluation"]["trained"]["perplexity"]
    assert figures["evaluation"]["trained"]["perplexity"] == pytest.approx(recorded, rel=1e-4)


@pytest.mark.slow
def test_jobs_of_a_sweep_are_granted_what_the_sweep_was(options: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "rotexp.train", "--config-dir", str(PARTS), "-m", TYPED, *options),
            *("train.steps=1", "optimizer=heavy_ball", "optimizer.lr=0.02,0.04", f"hydra.sweep.dir={tmp_path}/sweep"),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=PARTS,
    )
    assert ended.returncode == 0, ended.stderr
    jobs = json.loads((tmp_path / "sweep" / "jobs.json").read_text())
    assert [job["name"] for job in jobs] == ["optimizer.lr-0.02", "optimizer.lr-0.04"]
    rates = [json.loads(line)["train/lr"] for job in jobs for line in _steps(tmp_path / "sweep" / job["name"])]
    assert rates == [0.02, 0.04]
    report = rotexp("report", str(tmp_path / "sweep"))
    assert "optimizer.lr" in report.stdout


def _steps(folder: Path) -> list[str]:
    return [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "train/loss" in line]


def test_the_console_script_does_not_see_the_working_folder() -> None:
    """Python puts it on its path for `python -m` alone; the refusal says so."""
    script = shutil.which("rotexp-train", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("rotexp-train is not installed beside this Python")
    command = [script, "--config-dir", str(PARTS), TYPED, "optimizer=heavy_ball", "launch.nproc=0"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True, cwd=PARTS)
    assert refused.returncode == 2
    assert "start by python -m in the folder that holds it, or name that in PYTHONPATH" in refused.stderr
    environment = os.environ | {"PYTHONPATH": str(PARTS)}
    found = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "launch.nproc=0: must be at least 1" in found.stderr


def test_the_configuration_is_shown_with_the_searchpath_of_hydra() -> None:
    shown = rotexp("train", f"hydra.searchpath=[file://{PARTS}]", TYPED, "optimizer=heavy_ball", "--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    assert "optimizer:\n  _target_: their_parts.HeavyBall\n  lr: 0.05\n" in shown.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_riemannian_adam_of_geoopt_trains_resumes_and_runs_on_two_ranks(tmp_path: Path) -> None:
    """The plug-in at its defaults, on tiny; tests/unit/test_part_checks.py checks its rules."""
    pytest.importorskip("geoopt")
    options = ("evaluation.max_windows=8", "launch.threads=1", "tracker=jsonl", "train.steps=20")
    given = ("--config-dir", "conf", "plugins=[geoopt_adam]", "optimizer=geoopt_adam", *options)
    one = run_train(tmp_path / "one", *given, "train.checkpoint_every=10", cwd=GEOOPT, timeout=280)
    assert one.code == 0, one.errors
    assert one.perplexities["trained"] < one.perplexities["hadamard"]
    resume = f"resume={one.folder / 'checkpoints' / 'step-00000010'}"
    resumed = run_train(tmp_path / "resumed", *given, resume, cwd=GEOOPT, timeout=280)
    assert resumed.code == 0, resumed.errors
    assert all(torch.equal(resumed.rotations[name], rotation) for name, rotation in one.rotations.items())
    ranks = ("train.steps=2", "sharding=full", "launch.nproc=2")
    two = run_train(tmp_path / "two", *given[:-1], *ranks, cwd=GEOOPT)
    assert two.code == 0, two.errors
    assert two.steps[0]["train/loss"] == pytest.approx(one.steps[0]["train/loss"], rel=1e-4)
    assert two.summary["replica"]["max_abs_diff"] == 0.0


def test_a_file_grants_nothing_by_hydra_s_own_record_of_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "trick.yaml").write_text(
        "defaults: [config, {override optimizer: heavy_ball}, _self_]\n"
        "plugins: [their_parts]\n"
        "hydra: {overrides: {task: ['plugins=[their_parts]']}}\n"
    )
    shutil.copytree(PARTS / "optimizer", tmp_path / "optimizer")
    refused = rotexp("train", "--config-dir", str(tmp_path), "--config-name", "trick", "launch.nproc=0")
    assert refused.returncode == 2
    assert "hydra.overrides.task.0: is set by a file" in refused.stderr
