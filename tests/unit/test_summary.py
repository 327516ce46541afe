"""Training that made a model worse is said to have done so, whatever it started from."""

from __future__ import annotations

from typing import Any

import pytest

from rotexp.tracking.summary import train_summary
from rotexp.training.best import Choice
from rotexp.training.state import TrainResult


def improved(losses: list[float], **perplexities: float) -> bool | None:
    rows: dict[str, Any] = {name: {"perplexity": value} for name, value in perplexities.items()}
    found: bool | None = train_summary(TrainResult(losses=losses), rows, world_size=1)["improved"]
    return found


@pytest.mark.parametrize(
    ("rows", "better"),
    [
        ({"quantized": 50.0, "hadamard": 20.0, "start": 10.0, "trained": 15.0}, False),
        ({"quantized": 50.0, "hadamard": 12.0, "start": 16.0, "trained": 15.0}, True),
        ({"quantized": 50.0, "hadamard": 20.0, "trained": 25.0}, False),
        ({"quantized": 50.0, "hadamard": 20.0, "trained": 15.0}, True),
        ({"quantized": 10.0, "trained": 99.0}, False),
        ({"quantized": 10.0, "trained": 9.0}, True),
    ],
)
def test_the_trained_model_is_compared_with_what_training_started_from(rows: dict[str, float], better: bool) -> None:
    assert improved([1.0], **rows) is better


def test_nothing_trained_is_neither_better_nor_worse() -> None:
    assert improved([], quantized=10.0, hadamard=9.0, trained=9.0) is None


def test_hours_are_those_of_all_ranks() -> None:
    best = Choice(3, 2.0, "train/loss")
    result = TrainResult(losses=[3.0, float("nan"), 2.0], skipped=[2], best=best, seconds=1800.0)
    summary = train_summary(result, {"quantized": {"perplexity": 2.0}, "trained": {"perplexity": 1.0}}, world_size=4)
    assert (summary["device_hours"], summary["skipped"], summary["best_step"], summary["steps"]) == (2.0, [2], 3, 3)
