"""Sweeps by plugins of Hydra: SLURM through submitit, against a stand-in for the cluster, and Optuna."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

START_SECONDS = 280

needs_submitit = pytest.mark.skipif(
    not (find_spec("submitit") and find_spec("hydra_plugins.hydra_submitit_launcher")),
    reason="needs the extra slurm: pip install -e '.[slurm]'",
)
needs_optuna = pytest.mark.skipif(
    not (find_spec("optuna") and find_spec("hydra_plugins.hydra_optuna_sweeper")),
    reason="needs the extra optuna: pip install -e '.[optuna]'",
)

CLUSTER = {
    # starts each task of the array as if it were a node, and again when scontrol has asked for that
    "sbatch": """
        import os, re, shutil, subprocess, sys
        from pathlib import Path
        here = Path(sys.argv[0]).parent
        shutil.copy(sys.argv[1], here / "script.sh")
        (here / "arguments.txt").write_text(" ".join(sys.argv[1:]))
        array = re.search(r"--array=0-([0-9]+)", Path(sys.argv[1]).read_text())
        for task in range(int(array.group(1)) + 1 if array else 1):
            place = {"SLURM_JOB_ID": 7 + task, "SLURM_NTASKS": 1, "SLURM_NNODES": 1, "SLURM_PROCID": 0,
                     "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_STEP_ID": 0, "SLURM_JOB_NODELIST": "localhost",
                     "FAKE_TASK": task} | ({"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": task} if array else {})
            again = here / f"requeue-{task}"
            loop = f'while true; do bash "{sys.argv[1]}"; [ -f {again} ] || break; rm {again}; done'
            subprocess.Popen(["bash", "-c", loop], env=os.environ | {name: str(value) for name, value in place.items()},
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print("Submitted batch job 7")
    """,
    "srun": """
        import os, sys
        command = sys.argv[sys.argv.index("-u") - 1:]
        log = os.open(f"{sys.argv[0]}-{os.environ['FAKE_TASK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        os.execv(command[0], command)
    """,
    "scontrol": """
        import os, sys
        from pathlib import Path
        assert sys.argv[1] == "requeue", sys.argv
        Path(sys.argv[0]).with_name(f"requeue-{os.environ['FAKE_TASK']}").touch()
    """,
    "sacct": "print('JobID|State|NodeList')",
}
"""The commands of SLURM that submitit calls."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a stand-in for SLURM on the path."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, text in CLUSTER.items():
        file = folder / name
        file.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}", encoding="utf-8")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield folder
    mark = str(folder)
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in part for part in process.info["cmdline"] or ()):
            process.kill()


def sweep_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rotexp.train", "-m", *arguments, "tracker=jsonl"]


def run_sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(sweep_command(*arguments), check=False, capture_output=True, text=True, timeout=START_SECONDS)


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@needs_submitit
def test_slurm_gets_one_script_for_the_jobs_that_are_right_and_runs_them(
    small: list[str], cluster: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    options = ("hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8", "hydra.launcher.timeout_min=90")
    sweep = run_sweep("hydra/launcher=submitit_slurm", *options, "seed=0,-1,1", *small, f"hydra.sweep.dir={folder}")
    script = (cluster / "script.sh").read_text()
    lines = ("--array=0-1%", "--ntasks-per-node=1", "--nodes=1", "--partition=gpu", "--gpus-per-node=8", "--time=90")
    assert [line for line in lines if f"#SBATCH {line}" not in script] == []
    assert re.search(rf"^srun .*{re.escape(sys.executable)} -u -m submitit.core._submit ", script, re.MULTILINE)
    assert "#SBATCH --job-name=rotexp\n" in script
    logs = "".join(file.read_text() for file in cluster.glob("srun-*.log"))
    assert [summary_of(folder / f"seed-{seed}")["status"] for seed in (0, 1)] == ["done", "done"], logs
    assert sweep.stderr.splitlines()[0] == "rotexp: seed=-1: must be 0 or more; choose another"
    assert sweep.returncode == 2
    table = {row.split("│")[1].strip(): row for row in sweep.stdout.splitlines() if row.count("│") > 4}
    assert "done" in table["0"]
    assert "refused" in table["-1"]
    assert f"{summary_of(folder / 'seed-1')['evaluation']['trained']['perplexity']:.4g}" in table["1"]


@needs_submitit
def test_a_job_that_slurm_preempts_is_requeued_and_goes_on(small: list[str], cluster: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    steps = ["train.steps=150", *(override for override in small if not override.startswith("train.steps"))]
    command = sweep_command("hydra/launcher=submitit_slurm", "seed=0", *steps, f"hydra.sweep.dir={folder}")
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = folder / "single" / "metrics.jsonl"
    deadline = time.monotonic() + START_SECONDS
    while not (metrics.exists() and metrics.read_text().count("train/loss") > 3):
        assert sweep.poll() is None, sweep.communicate()
        assert time.monotonic() < deadline, list(cluster.iterdir())
        time.sleep(0.1)
    jobs = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "submitit.core._submit" in (process.info["cmdline"] or ()) and "python" in process.info["cmdline"][0]
    ]
    assert len(jobs) == 1
    jobs[0].send_signal(signal.SIGUSR2)
    output, errors = sweep.communicate(timeout=START_SECONDS)
    log = (cluster / "srun-0.log").read_text()
    assert sweep.returncode == 0, errors + log
    assert summary_of(folder / "single")["status"] == "done"
    steps_logged = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if "train/loss" in line]
    assert steps_logged == sorted(set(steps_logged)), "no step was made twice"
    assert steps_logged[-1] == 150
    assert "interrupted by SIGUSR2" in log
    assert "1 of 1 jobs done" in output


@needs_submitit
def test_a_scheduler_that_refuses_is_one_line_and_exit_code_1(small: list[str], cluster: Path, tmp_path: Path) -> None:
    (cluster / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    sweep = run_sweep("hydra/launcher=submitit_slurm", "seed=0,1", *small, f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert sweep.returncode == 1
    assert "Traceback" not in sweep.stderr
    assert "the scheduler: FailedJobError" in sweep.stderr
    assert "invalid partition" in sweep.stderr
    assert sweep.stdout.count("it left no summary") == 2


@needs_optuna
def test_optuna_minimizes_the_metric_that_runs_return(small: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    sweep = run_sweep(
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
        "optimizer.lr=interval(0.01,0.3)",
        *small,
        f"hydra.sweep.dir={folder}",
    )
    assert sweep.returncode == 0, sweep.stderr
    folders = [path for path in folder.iterdir() if path.is_dir()]
    assert len(folders) == 3
    assert all(path.name.startswith("optimizer.lr-0.") for path in folders)
    perplexities = [summary_of(path)["evaluation"]["trained"]["perplexity"] for path in folders]
    best = re.search(r"best_value: (.+)", (folder / "optimization_results.yaml").read_text())
    assert best is not None
    assert float(best.group(1)) == min(perplexities)


@needs_optuna
def test_a_wrong_trial_does_not_end_the_search_and_a_repeated_one_is_not_run_again(
    small: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    search = ("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=2")
    sweep = run_sweep(
        "hydra/sweeper=optuna", *search, "optimizer.lr=choice(0.1,-1)", *small, f"hydra.sweep.dir={folder}"
    )
    assert sweep.returncode == 2, sweep.stderr
    jobs = {job["name"]: job["status"] for job in json.loads((folder / "jobs.json").read_text())}
    assert jobs == {"optimizer.lr-0.1": "done", "optimizer.lr--1": "refused"}
    perplexity = summary_of(folder / "optimizer.lr-0.1")["evaluation"]["trained"]["perplexity"]
    assert f"best_value: {perplexity}" in (folder / "optimization_results.yaml").read_text()
    assert sweep.stdout.count("optimizer.lr-0.1 starts") == 1
