"""A run's phases come in their order, one that fails names itself, and a run leaves torch and trackers in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from nano_run import NANO
from rich.console import Console

from rotexp.experiment import context as contexts
from rotexp.experiment import experiment
from rotexp.experiment.context import PHASES, Context, Messages, open_context
from rotexp.experiment.inputs import Inputs, open_inputs
from rotexp.process.signals import Interrupted
from rotexp.sharding.guard import installed
from rotexp.sharding.options import SyncConfig, SyncMode
from rotexp.tracking.phases import PhaseError
from rotexp.tracking.recording import Trackers
from rotexp.training.options import EMAConfig, TrainConfig

CONFIG = replace(NANO, ema=EMAConfig(decay=0.5))

FUNCTIONS = {
    "load": "load_model",
    "shard": "shard_model",
    "prepare": "prepare_model",
    "train": "train_model",
    "save": "save_run_files",
    "merge": "merge_model",
}
"""What is called in a phase."""


class Listening:
    """A tracker that keeps how a run ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[Mapping[str, Any], int]] = []

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Take the metrics of a step."""

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """Keep the end state."""
        self.ends.append((dict(summary), exit_code))


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    """What the run of `CONFIG` reads."""
    return open_inputs(CONFIG)


@pytest.fixture(autouse=True)
def own_accelerator() -> Iterator[None]:
    """Let torch be as deterministic as it was before."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def opened(inputs: Inputs, tmp_path: Path) -> Callable[..., Context]:
    """Opens a run of `CONFIG` with some changes."""

    def open_changed(**changes: Any) -> Context:
        return open_context(replace(CONFIG, **changes), inputs, tmp_path, accelerator=Accelerator(cpu=True))

    return open_changed


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Listening:
    """The only tracker of a run."""
    tracker = Listening()
    monkeypatch.setattr(contexts, "open_trackers", lambda *_arguments, **_options: Trackers([tracker]))
    return tracker


@contextmanager
def failing(phase: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Let a phase fail; yield whether a guard was installed when it did."""
    guarded: list[bool] = []

    def fail(*_arguments: Any, **_options: Any) -> None:
        guarded.append(installed() is not None)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(experiment, FUNCTIONS[phase], fail)
        yield guarded


@pytest.mark.parametrize("averaged", [True, False])
def test_the_phases_come_in_their_order_and_the_summary_tells_the_time_of_each(
    averaged: bool, opened: Callable[..., Context], tmp_path: Path
) -> None:
    began: list[str] = []
    context = opened(ema=EMAConfig(decay=0.5 if averaged else None))
    context.phases._begin = began.append
    experiment.run_experiment(context)
    expected = [phase for phase in PHASES if averaged or phase != "average"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert began == [*summary["time"]] == [*summary["memory"]] == expected
    assert (summary["status"], summary["error"], summary["train"]["steps"]) == ("done", None, 2)
    assert ("average" in summary["evaluation"]) == averaged
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    timed = [key for row in rows for key in row if key.startswith("time/") and key[5:-2] in PHASES]
    assert timed == [f"time/{phase}_s" for phase in expected]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    assert (tmp_path / "rotations.safetensors").exists()


@pytest.mark.parametrize("phase", FUNCTIONS)
def test_a_phase_that_fails_names_itself_and_leaves_torch_as_it_was(
    phase: str, opened: Callable[..., Context], listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = opened(sync_mode=SyncConfig(SyncMode.universal), train=TrainConfig(steps=0))
    failure = pytest.raises(PhaseError, match=rf"^phase {phase}: ArithmeticError: it broke$")
    with failing(phase, ArithmeticError("it broke"), monkeypatch) as guarded, failure as caught:
        experiment.run_experiment(context)
    assert caught.value.phase == phase
    assert guarded == [PHASES.index(phase) > PHASES.index("shard")]
    assert installed() is None
    ((summary, exit_code),) = listening.ends
    assert (summary["status"], summary["error"], exit_code) == (
        "failed",
        f"phase {phase}: ArithmeticError: it broke",
        1,
    )
    assert ("sharding" in summary) == guarded[0]


def test_an_interruption_is_no_failure_of_its_phase(
    opened: Callable[..., Context], listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing("shard", Interrupted(15), monkeypatch), pytest.raises(Interrupted):
        experiment.run_experiment(opened())
    ((summary, exit_code),) = listening.ends
    assert (summary["status"], summary["error"], exit_code) == ("interrupted", "interrupted by SIGTERM", 1)


def test_a_weight_that_fails_to_be_read_leaves_no_guard(
    opened: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is installed in the middle of a phase, before what that phase can fail by."""
    seen: list[bool] = []

    def unreadable(*_arguments: Any, **_options: Any) -> None:
        seen.append(installed() is not None)
        raise ValueError("lost")

    monkeypatch.setattr("rotexp.experiment.loading.materialize", unreadable)
    with pytest.raises(PhaseError, match=r"^phase shard: ValueError: lost$"):
        experiment.run_experiment(opened(sync_mode=SyncConfig(SyncMode.universal)))
    assert (seen, installed()) == ([True], None)


def test_names_in_brackets_are_told_as_they_are() -> None:
    out = StringIO()
    messages = Messages(Console(file=out, width=20))
    messages.say("run folder: runs/[bold]/:warning:/and so on and on")
    messages.warn("[red] is a folder")
    assert out.getvalue() == ("run folder: runs/[bold]/:warning:/and so on and on\nwarning: [red] is a folder\n")
