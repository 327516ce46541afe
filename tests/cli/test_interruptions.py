"""However a run ends, every rank is gone soon, the exit code is right, and the folder says what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rotexp.folders import claimed

pytestmark = pytest.mark.slow

GONE_SECONDS = 30
START_SECONDS = 180
NANO = [
    "model=random_llama",
    "data.sequence_length=32",
    "data.global_batch_size=2",
    "evaluation.window=32",
    "evaluation.max_windows=2",
    "launch.threads=1",
    "tracker=jsonl",
]


def start(
    *overrides: str, place: Path, folder: Path | None = None, command: tuple[str, ...] = (), **variables: str
) -> subprocess.Popen[str]:
    """Start a small run in the directory `place`, in the run folder named or one of its own."""
    where = [f"hydra.run.dir={folder}"] if folder else []
    interpreter = command or (sys.executable, "-m", "rotexp.train")
    return subprocess.Popen(
        [*interpreter, *NANO, *where, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables,
        cwd=place,
        start_new_session=True,
    )


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def wait_for_steps(run: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and "train/loss" in metrics.read_text()):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(run.pid).children(recursive=True)
    return [child for child in children if any("spawn_main" in part for part in child.cmdline())]


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Any]:
    """Start a run, let it train, do something to it; return its exit code, errors and summary, nothing left behind."""
    started: list[subprocess.Popen[str]] = []

    def end(act: Any, *overrides: str) -> tuple[int, str, dict[str, Any]]:
        folder = tmp_path / "run"
        run = start("train.steps=100000", *overrides, folder=folder, place=tmp_path)
        started.append(run)
        wait_for_steps(run, folder)
        family = psutil.Process(run.pid).children(recursive=True)
        act(run)
        _, errors = run.communicate(timeout=GONE_SECONDS)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
        return run.returncode, errors, summary_of(folder)

    yield end
    for run in started:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_interrupt_the_run(ending: Any, ranks: int, number: signal.Signals, code: int) -> None:
    exit_code, errors, summary = ending(lambda run: run.send_signal(number), f"launch.nproc={ranks}")
    assert exit_code == code
    assert summary["status"] == "interrupted"
    assert number.name in summary["error"]
    assert errors.count("rotexp:") == 1


def test_ctrl_c_reaches_every_process_of_a_terminal(ending: Any) -> None:
    exit_code, errors, summary = ending(lambda run: os.killpg(run.pid, signal.SIGINT), "sharding=full")
    assert exit_code == 130
    assert summary["status"] == "interrupted"
    assert "Traceback" not in errors


def test_a_killed_rank_ends_the_others(ending: Any) -> None:
    exit_code, errors, summary = ending(lambda run: ranks_of(run)[1].kill(), "sharding=full")
    assert exit_code == 1
    assert summary["status"] == "failed"
    assert "SIGKILL" in summary["error"]
    assert errors.count("rotexp:") == 1


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    run = start("train.steps=100000", "sharding=full", folder=tmp_path / "run", place=tmp_path)
    try:
        wait_for_steps(run, tmp_path / "run")
        ranks = ranks_of(run)
        assert len(ranks) == 2
        run.kill()
        _, alive = psutil.wait_procs(ranks, timeout=GONE_SECONDS)
        assert not alive
    finally:
        run.kill()
        run.communicate()


def test_an_exception_on_one_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "rank-1.log").mkdir(parents=True)  # so that only rank 1 cannot open its log
    run = start("train.steps=100000", "sharding=full", folder=tmp_path / "run", place=tmp_path)
    _, errors = run.communicate(timeout=START_SECONDS)
    assert run.returncode == 1
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert "rank 1" in summary_of(tmp_path / "run")["error"]
    assert "IsADirectoryError" in summary_of(tmp_path / "run")["error"]
    assert errors.count("rotexp:") == 1


def test_launches_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    runs = [start("train.steps=0", "launch.nproc=2", place=tmp_path) for _ in range(2)]
    for run in runs:
        _, errors = run.communicate(timeout=START_SECONDS)
        assert run.returncode == 0, errors
    summaries = list(tmp_path.glob("runs/*/*/summary.json"))
    assert len(summaries) == 2
    assert all(json.loads(path.read_text())["world_size"] == 2 for path in summaries)


TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "rotexp.train",
)


def test_a_second_launch_by_torchrun_is_refused_and_leaves_a_live_run_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder, key="hydra.run.dir"):
        (folder / "summary.json").write_text('{"status": "running", "error": null}')
        run = start("train.steps=2", "sharding=full", folder=folder, command=TORCHRUN, place=tmp_path)
        _, errors = run.communicate(timeout=START_SECONDS)
        assert run.returncode != 0
        assert errors.count("rotexp: ") == 1
        assert f"rotexp: hydra.run.dir={folder}: another process runs in it" in errors
        assert summary_of(folder) == {"status": "running", "error": None}
        assert {path.name for path in folder.iterdir()} == {"summary.json", ".lock"}


def test_torchruns_ranks_are_adopted_and_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("train.steps=2", "sharding=full", folder=folder, command=TORCHRUN, place=tmp_path)
    output, errors = run.communicate(timeout=START_SECONDS)
    assert run.returncode == 0, errors
    assert summary_of(folder)["status"] == "done"
    assert summary_of(folder)["world_size"] == 2
    assert {path.name for path in folder.glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}
    assert output.count("run folder:") == 1


def test_slurms_tasks_are_adopted_and_share_a_folder(tmp_path: Path) -> None:
    runs = []
    for task in range(2):
        slurm = {
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": str(os.getpid()),
        }
        runs.append(start("train.steps=1", "sharding=full", folder=tmp_path / f"task{task}", place=tmp_path, **slurm))
    for run in runs:
        _, errors = run.communicate(timeout=START_SECONDS)
        assert run.returncode == 0, errors
    assert summary_of(tmp_path / "task0")["world_size"] == 2
    assert not (tmp_path / "task1").exists()
