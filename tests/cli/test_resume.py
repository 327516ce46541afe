"""A run that is interrupted, killed or refused loses nothing: the same command goes on, as if nothing had happened."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_train import Run, left_behind, run_train
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

START_SECONDS = 200
STEPS = 20
SLOW = """
import time
from rotexp.training.meter import Meter
row = Meter.row
def slowly(*arguments, **options):
    time.sleep(0.3)
    return row(*arguments, **options)
Meter.row = slowly
if __name__ == "__main__":
    from rotexp.train import main
    main()
"""
"""Runs the command, every step of it longer by 0.3 s, so that there is time to end it in the middle."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that trains slowly."""
    program = tmp_path_factory.mktemp("program") / "slow.py"
    program.write_text(SLOW)
    return str(program)


@pytest.fixture(scope="module")
def arguments(small: list[str]) -> list[str]:
    """The small run of more steps."""
    kept = [override for override in small if not override.startswith("train.steps=")]
    return [*kept, f"train.steps={STEPS}"]


@pytest.fixture
def end(slow: str) -> Iterator[Callable[..., Run]]:
    """Start a slow run; once it has made some steps, send it a signal, and return it when no process of it is left."""
    started: list[subprocess.Popen[str]] = []

    def run(folder: Path, *arguments: str, number: signal.Signals, steps: int) -> Run:
        process = subprocess.Popen(
            [sys.executable, slow, *arguments, f"hydra.run.dir={folder}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"ROTEXP_TEST": str(folder)},
            start_new_session=True,
        )
        started.append(process)
        wait_for_steps(process, folder, steps)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        return Run(folder, process.returncode, output, errors, left_behind(str(folder)))

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("train/loss") < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*step-*"))


def wandb_history(folder: Path) -> list[tuple[str, int, float | None]]:
    """Return run id, step and loss of every row in the folder's offline W&B runs, in the order they were made."""
    from offline_wandb import recorded, row_of  # imports wandb

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in recorded(file):
            if record.WhichOneof("record_type") == "history":
                row = row_of(record.history)
                rows.append((file.stem, row["_step"], row.get("train/loss")))
    return rows


@pytest.fixture(scope="module")
def straight(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing happened to."""
    done = run_train(tmp_path_factory.mktemp("straight") / "run", *arguments, "tracker=jsonl")
    assert (done.code, done.errors) == (0, "")
    return done


def check_same(found: Run, expected: Run) -> None:
    """Check that a run ended as another, and that its metrics have every step once."""
    assert (found.code, found.summary["status"]) == (0, "done")
    assert [row["step"] for row in found.steps] == list(range(1, STEPS + 1))
    assert [row["train/loss"] for row in found.steps] == [row["train/loss"] for row in expected.steps]
    assert found.rotations.keys() == expected.rotations.keys()
    for name, matrix in expected.rotations.items():
        assert torch.equal(found.rotations[name], matrix), name
    best = [load_file(run.folder / "rotations_best.safetensors") for run in (found, expected)]
    assert all(torch.equal(best[0][name], matrix) for name, matrix in best[1].items())
    assert found.summary["evaluation"] == expected.summary["evaluation"]
    for key in ("steps", "loss_start", "loss_end", "best_step", "improved"):
        assert found.summary["train"][key] == expected.summary["train"][key]


def test_sigterm_saves_and_the_same_command_continues(
    end: Any, arguments: list[str], straight: Run, tmp_path: Path
) -> None:
    given = [*arguments, "tracker.mode=offline"]
    ended = end(tmp_path / "run", *given, number=signal.SIGTERM, steps=3)
    assert (ended.code, ended.left_behind) == (143, [])
    assert ended.summary["status"] == "interrupted"
    assert ended.summary["error"] == "interrupted by SIGTERM"
    assert ended.errors.count("rotexp:") == 1
    last = ended.steps[-1]["step"]
    assert 3 <= last < STEPS
    assert checkpoints(ended.folder) == [f"step-{last:08d}"]
    assert (ended.folder / "checkpoints" / "latest").read_text() == f"step-{last:08d}\n"

    continued = run_train(ended.folder, *given)
    assert f"after step {last}" in continued.output
    check_same(continued, straight)
    assert len([row for row in continued.rows if "eval/float/perplexity" in row]) == 1
    rows = wandb_history(ended.folder)
    assert len({run_id for run_id, *_ in rows}) == 1
    steps = [step for _, step, _ in rows]
    assert steps == sorted(steps)
    losses = [(step, loss) for _, step, loss in rows if loss is not None]
    assert losses == [(row["step"], row["train/loss"]) for row in straight.steps]


def test_slurms_signal_of_pre_emption_saves_on_all_ranks(end: Any, arguments: list[str], tmp_path: Path) -> None:
    given = [*arguments, "sharding=full", "tracker=jsonl", "train.async_checkpoints=true", "train.params=all"]
    ended = end(tmp_path / "run", *given, number=signal.SIGUSR1, steps=2)
    assert (ended.code, ended.left_behind) == (143, [])
    assert (ended.summary["status"], ended.summary["error"]) == ("interrupted", "interrupted by SIGUSR1")
    assert ended.errors.count("rotexp:") == 1
    last = ended.steps[-1]["step"]
    assert checkpoints(ended.folder) == [f"step-{last:08d}"]

    continued = run_train(ended.folder, *given)
    assert (continued.code, continued.left_behind) == (0, [])
    assert f"after step {last}" in continued.output
    assert [row["step"] for row in continued.steps] == list(range(1, STEPS + 1))
    assert len(load_file(ended.folder / "weights.safetensors")) == 21


def test_a_killed_run_goes_on_from_the_last_complete_checkpoint(
    end: Any, arguments: list[str], straight: Run, tmp_path: Path
) -> None:
    """The newest is cut short, as a disk may leave it."""
    given = [*arguments, "tracker=jsonl", "train.checkpoint_every=1", "train.keep_checkpoints=3"]
    killed = end(tmp_path / "run", *given, number=signal.SIGKILL, steps=4)
    assert killed.code == -signal.SIGKILL
    assert killed.summary["status"] == "running"
    complete = [name for name in checkpoints(killed.folder) if name.startswith("step-")]
    newest = killed.folder / "checkpoints" / complete[-1]
    file = next(newest.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)

    continued = run_train(killed.folder, *given)
    assert f"resume: {newest}: {file.name} is truncated" in continued.output
    assert f"resume: resumed from {killed.folder / 'checkpoints' / complete[-2]}" in continued.output
    check_same(continued, straight)
    assert checkpoints(killed.folder) == [f"step-{step:08d}" for step in range(STEPS - 2, STEPS + 1)]


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(
    straight: Run, arguments: list[str], odd_checkpoint: Path, tmp_path: Path
) -> None:
    source = straight.folder / "checkpoints" / f"step-{STEPS:08d}"
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    other = [argument for argument in arguments if not argument.startswith("model.path=")]
    refused = run_train(tmp_path / "run", *other, f"model.path={odd_checkpoint}", f"resume={source}", "tracker=jsonl")
    assert refused.code == 2
    (line,) = refused.errors.splitlines()
    assert line.startswith(f"rotexp: model={odd_checkpoint}: must be ")
    assert not refused.folder.exists()
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


REFUSED = {
    "train.params=all": "train.params=all: must be rotations, as it was",
    "train.steps=3": f"train.steps=3: must be at least the {STEPS} done",
    "resume=/nowhere": "resume=/nowhere: holds no complete checkpoint (none is there); name a run that has one",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_continued_is_refused_before_anything_starts(
    straight: Run, arguments: list[str], override: str, tmp_path: Path
) -> None:
    key = override.partition("=")[0]
    kept = [argument for argument in arguments if not argument.startswith(f"{key}=")]
    resume = [] if key == "resume" else [f"resume={straight.folder}"]
    refused = run_train(tmp_path / "run", *kept, *resume, override)
    assert refused.code == 2
    (line,) = refused.errors.splitlines()
    assert line.startswith(f"rotexp: {REFUSED[override]}")
    assert not (tmp_path / "run").exists()


def test_a_folder_in_which_another_process_runs_is_refused(arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = run_train(folder, *arguments)
    assert refused.code == 2
    assert refused.errors == (f"rotexp: hydra.run.dir={folder}: another process runs in it; wait, or choose another\n")
    assert [path.name for path in folder.iterdir()] == [".lock"]
