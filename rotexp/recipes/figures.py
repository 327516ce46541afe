"""What of a finished run a recipe compares: held-out figures, losses, gradient norms, the bits of its rotations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rotexp.runfolder.finished_run import FinishedRun
from rotexp.runfolder.records import read_metrics, revived

Value = float | tuple[float, ...]
"""A number, or one for every logged step."""

ROW_FIGURES = ("perplexity", "kl", "top1_agreement")
LOSS, NORMS = "train/loss", "grad_norm/"


def figures_of(run: FinishedRun) -> dict[str, Value]:
    """Return every figure of a run by its name.

    `train.losses` has the loss of each step that was logged; `grad_norm.*` are those of the last one.

    Raises:
        ValueError: its summary holds no held-out figures, or something that is no number.
    """
    where = f"{run.folder}: its summary"
    evaluation = revived(run.summary.get("evaluation"))
    if not isinstance(evaluation, dict):
        raise ValueError(f"{where} holds no evaluation; run it again")
    found: dict[str, Any] = {
        f"evaluation.{row}.{figure}": measured.get(figure) if isinstance(measured, dict) else None
        for row, measured in evaluation.items()
        for figure in ROW_FIGURES
        if row != "protocol"
    }
    found |= _of_training([row for row in revived(read_metrics(run.folder)) if LOSS in row])
    for name, value in found.items():
        if not is_value(value):
            raise ValueError(f"{where} has no number for {name}; run it again")
    return found


def is_value(value: object) -> bool:
    """Return whether something is a number, or a sequence of such."""
    if isinstance(value, tuple):
        return bool(value) and all(not isinstance(item, tuple) and is_value(item) for item in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _of_training(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of logged steps, nothing where none was."""
    if not steps:
        return {}
    losses, last = tuple(row[LOSS] for row in steps), steps[-1]
    norms = {key.replace("/", "."): value for key, value in last.items() if key.startswith(NORMS)}
    finite = [loss for loss in losses if is_value(loss) and math.isfinite(loss)]
    best = {"train.loss_best": min(finite)} if finite else {}
    return {"train.losses": losses, "train.loss_end": losses[-1], **best, **norms}


def difference(one: Value, other: Value) -> float:
    """Return by how much two figures differ, at the worst of their steps; infinite where they do not compare."""
    pairs = [*_paired(one, other)]
    return max((_apart(*pair) for pair in pairs), default=math.inf)


def largest(value: Value) -> float:
    """Return the largest finite magnitude that a figure has."""
    numbers = value if isinstance(value, tuple) else (value,)
    return max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)


def _paired(one: Value, other: Value) -> Iterator[tuple[float, float]]:
    """Yield the numbers of two figures side by side, none where there are not as many."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        yield from zip(one, other, strict=True) if len(one) == len(other) else ()
    elif not isinstance(one, tuple) and not isinstance(other, tuple):
        yield one, other


def _apart(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart
