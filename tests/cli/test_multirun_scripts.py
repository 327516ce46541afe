"""Every script of multirun_scripts runs with two steps of training, and every experiment says what it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (REPOSITORY / "multirun_scripts").glob("*.sh") if path.name != "scale.sh")
EXPERIMENTS = sorted((REPOSITORY / "conf" / "experiment").glob("*.yaml"))

JOBS = {
    "bits": 6,
    "learning_rate": 6,
    "rotation_placements": 4,
    "rotation_seeds": 6,
    "sharding_memory": 3,
    "sync_mode_cost": 4,
}
"""How many jobs each script has."""


def run_script(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "SCALE"} | {"PATH": path} | variables
    return subprocess.run(
        [str(script), *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=500,
        env=environment,
    )


def test_every_script_is_tested() -> None:
    assert [script.stem for script in SCRIPTS] == sorted(JOBS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_with_two_steps_of_training(script: Path, tmp_path: Path) -> None:
    ended = run_script(script, "train.steps=2", f"hydra.sweep.dir={tmp_path}")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    jobs = json.loads((tmp_path / "jobs.json").read_text())
    assert [job["status"] for job in jobs] == ["done"] * JOBS[script.stem]
    assert all(job["perplexity"] > 1 for job in jobs)
    summaries = [json.loads((tmp_path / job["name"] / "summary.json").read_text()) for job in jobs]
    assert {summary["train"]["steps"] for summary in summaries} <= {0, 2}, "an argument replaces what the scale says"


@pytest.mark.parametrize("scale", ["smollm2", "1b", "8b"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_composes_at_every_scale(script: Path, scale: str, tmp_path: Path) -> None:
    """By a seed that is refused when everything else is right."""
    refused = run_script(script, "seed=-1", f"hydra.sweep.dir={tmp_path}", SCALE=scale)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert set(refused.stderr.splitlines()) == {"rotexp: seed=-1: must be 0 or more; choose another"}


def test_a_wrong_scale_is_refused() -> None:
    refused = run_script(SCRIPTS[0], SCALE="huge")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "SCALE=huge: must be one of tiny, smollm2, 1b, 8b\n"


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.stem)
def test_an_experiment_says_its_question_command_time_and_memory(experiment: Path) -> None:
    text = experiment.read_text(encoding="utf-8")
    header = [line for line in text.splitlines() if line.startswith("#")]
    for entry in ("Question:", "Command:", "Time:", "Memory:"):
        assert any(line.startswith(f"# {entry}") for line in header), entry
    assert f"experiment={experiment.stem}" in text
    if "sweeper:" in text:
        assert f"multirun_scripts/{experiment.stem}.sh" in text
        assert experiment.stem in JOBS
