"""However a run ends, every rank is gone soon, the exit code is right, and the folder says what happened."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rotexp.files.folders import claimed

pytestmark = pytest.mark.slow

GONE_SECONDS = 30
START_SECONDS = 180
NANO = [
    "model=random_llama",
    "data=text",
    f"data.calibration={typing.__file__}",  # read far sooner than all prose of the standard library
    f"data.evaluation={ast.__file__}",
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


LONG = """
import time
from rotexp.training.objectives import CrossEntropy
whole, calls = CrossEntropy.__call__, []
def objective(self, model, token_ids, *, teacher):
    calls.append(1)
    if len(calls) == 3:
        time.sleep(600)
    return whole(self, model, token_ids, teacher=teacher)
CrossEntropy.__call__ = objective
if __name__ == "__main__":
    from rotexp.train import main
    main()
"""
"""Runs the command; its third step takes ten minutes."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_longer_than_the_grace_does_not_keep_a_run_alive(tmp_path: Path, ranks: int) -> None:
    program, folder = tmp_path / "long.py", tmp_path / "run"
    program.write_text(LONG)
    options = (f"launch.nproc={ranks}", "train.steps=9", "train.checkpoint_every=1", "launch.grace_seconds=2")
    run = start(*options, folder=folder, place=tmp_path, command=(sys.executable, str(program)))
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (folder / "checkpoints" / "step-00000002").exists():
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=GONE_SECONDS)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert (run.returncode, errors.count("\n")) == (143, 1)
    said = "interrupted by SIGTERM; launch.grace_seconds=2 ran out; the newest checkpoint is step-00000002"
    assert said in errors
    assert (summary_of(folder)["status"], summary_of(folder)["error"]) == ("interrupted", said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_rank_does_not_keep_a_run_alive(ending: Any, number: signal.Signals, tmp_path: Path) -> None:
    """Its last checkpoint stays, from which the same command goes on."""

    def act(run: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not list(tmp_path.glob("run/checkpoints/step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ranks_of(run)[1].suspend()
        run.send_signal(number)

    options = ("sharding=full", "launch.grace_seconds=3", "train.checkpoint_every=1")
    code, errors, summary = ending(act, *options)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert summary["status"] == "interrupted"
    assert errors.count("\n") == 1, errors
    (newest,) = sorted(path.name for path in tmp_path.glob("run/checkpoints/step-*"))[-1:]
    grace = f"; launch.grace_seconds=3 ran out; the newest checkpoint is {newest}" if number != signal.SIGINT else ""
    assert summary["error"] == f"interrupted by {number.name}{grace}"
    step = int(newest.removeprefix("step-"))
    again = start(*options, f"train.steps={step + 1}", folder=tmp_path / "run", place=tmp_path)
    output, errors = again.communicate(timeout=START_SECONDS)
    assert (again.returncode, errors) == (0, "")
    assert f"after step {step}" in output


def test_a_rank_that_alone_is_told_to_end_interrupts_the_run(ending: Any) -> None:
    code, errors, summary = ending(lambda run: ranks_of(run)[1].terminate(), "sharding=full")
    assert (code, summary["status"], errors.count("\n")) == (143, "interrupted", 1)
    assert summary["error"] == "interrupted by SIGTERM"


def test_a_stopped_rank_does_not_keep_the_ranks_of_torchrun_alive(tmp_path: Path) -> None:
    """The other one leaves in time by itself, and records how the run ended; torchrun kills after half a minute."""
    folder = tmp_path / "run"
    options = ("train.steps=100000", "sharding=full", "launch.grace_seconds=2")
    run = start(*options, folder=folder, command=TORCHRUN, place=tmp_path)
    try:
        wait_for_steps(run, folder)
        ranks = [rank for rank in psutil.Process(run.pid).children(recursive=True) if "rotexp.train" in rank.cmdline()]
        first, second = sorted(ranks, key=lambda rank: rank.environ()["RANK"])
        second.suspend()
        first.terminate()
        run.communicate(timeout=2 * GONE_SECONDS)
        assert run.returncode != 0
        assert summary_of(folder)["status"] == "interrupted"
        assert "interrupted by SIGTERM; launch.grace_seconds=2 ran out" in summary_of(folder)["error"]
    finally:
        run.kill()
        run.communicate()


def started_ranks(run: subprocess.Popen[str]) -> int:
    try:
        return len(ranks_of(run))
    except psutil.Error:  # one that ended meanwhile
        return 0


BEGINNINGS: dict[str, Callable[[subprocess.Popen[str], Path], bool]] = {
    "folder": lambda _run, folder: folder.exists(),
    "summary": lambda _run, folder: (folder / "summary.json").exists(),
    "first_rank": lambda run, _folder: started_ranks(run) == 1,
    "all_ranks": lambda run, _folder: started_ranks(run) == 2,
    "logs": lambda _run, folder: len(list(folder.glob("rank-*.log"))) == 2,
}
"""Moments of a start."""


@pytest.mark.parametrize("moment", BEGINNINGS)
def test_a_signal_while_a_run_starts_is_one_line(moment: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("train.steps=100000", "sharding=full", folder=folder, place=tmp_path)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not BEGINNINGS[moment](run, folder):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(
            timeout=START_SECONDS
        )  # a rank is sent its inputs whole, which waits for its imports
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
    assert (run.returncode, errors.count("\n")) == (143, 1), errors
    assert "interrupted by SIGTERM" in errors
    if (folder / "summary.json").exists():
        assert summary_of(folder)["status"] == "interrupted"


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
