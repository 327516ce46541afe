"""One run per entry: that train, a sweep, evaluate and export do their work at all, in the quick suite.

What they do in every case is tested, more slowly, by their own files. The other entries (inspect, report, upload,
dashboard, doctor) are quick, and so are their files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_train import Run, run_train
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(900)

BEFORE_THE_ROOMS = Path(__file__).parent / "config_before_the_rooms.yaml"
"""What a run of the fixture's request wrote at commit 6817bc1; capitals stand for this machine's paths."""


def entry(name: str, *arguments: str, cwd: Path) -> str:
    """Run an entry in a process of its own, where it must end well and say nothing on standard error."""
    command = [sys.executable, "-m", f"rotexp.{name}", *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


@pytest.fixture(scope="module")
def run(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps on one rank."""
    return run_train(tmp_path_factory.mktemp("run") / "folder", *small, "tracker=jsonl", timeout=600)


@pytest.fixture
def old(run: Run, small: list[str], tmp_path: Path) -> Path:
    """The run's folder, its configuration as it was written before the code moved into rooms."""
    given = dict(override.split("=", 1) for override in small)
    text = BEFORE_THE_ROOMS.read_text(encoding="utf-8")
    for key in ("model.path", "data.calibration", "data.evaluation"):
        text = text.replace({"model.path": "CHECKPOINT"}.get(key, key.removeprefix("data.").upper()), given[key])
    folder = Path(shutil.copytree(run.folder, tmp_path / "old"))
    (folder / "config.resolved.yaml").write_text(text, encoding="utf-8")
    return folder


def test_train_trains(run: Run) -> None:
    assert (run.code, run.errors, run.left_behind) == (0, "", [])
    assert run.summary["status"] == "done"
    assert len(run.steps) == 2
    for matrix in run.rotations.values():
        assert torch.allclose(matrix @ matrix.mT, torch.eye(matrix.shape[-1]), atol=1e-5)


def test_a_sweep_runs_each_of_its_jobs(small: list[str], tmp_path: Path) -> None:
    shared = [override for override in small if not override.startswith(("train.steps", "evaluation.max_windows"))]
    jobs = ["train.steps=0,1", "evaluation.max_windows=1", "tracker=jsonl", f"hydra.sweep.dir={tmp_path}/sweep"]
    entry("train", "-m", *shared, *jobs, cwd=tmp_path)
    summaries = [json.loads(file.read_text()) for file in tmp_path.glob("sweep/*/summary.json")]
    assert sorted((summary["status"], summary["train"]["steps"]) for summary in summaries) == [("done", 0), ("done", 1)]


@pytest.mark.parametrize("folder", ["run", "old"])
def test_evaluate_finds_the_figures_of_the_run(folder: str, run: Run, old: Path, tmp_path: Path) -> None:
    asked = old if folder == "old" else run.folder
    entry("evaluate", f"run={asked}", f"out={tmp_path}/figures.json", cwd=tmp_path)
    found = json.loads((tmp_path / "figures.json").read_text())["evaluation"]
    assert found["trained"]["perplexity"] == pytest.approx(run.perplexities["trained"], rel=1e-6)


@pytest.mark.parametrize("folder", ["run", "old"])
def test_export_writes_rotated_weights(folder: str, run: Run, old: Path, checkpoint: Path, tmp_path: Path) -> None:
    asked = old if folder == "old" else run.folder
    output = entry("export", f"run={asked}", f"export.path={tmp_path}/exported", cwd=tmp_path)
    assert float(output.splitlines()[0].removeprefix("invariance: relative logit error ")) < 1e-5
    stored, source = (load_file(place / "model.safetensors") for place in (tmp_path / "exported", checkpoint))
    name = "model.layers.0.mlp.gate_proj.weight"
    assert stored[name].shape == source[name].shape
    assert not torch.allclose(stored[name], source[name], atol=1e-3)
