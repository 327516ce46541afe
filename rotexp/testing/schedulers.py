"""Check that a scheduler sets learning rates that depend on nothing but its arguments and the number of steps."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn

from rotexp.testing.rules import check_members, disturb, rule
from rotexp.training.schedulers import Scheduler, step_counts

WARMUP, STEPS = 3, 12
RATES = (0.1, 0.2)


def check_scheduler(cls: type[Any], **options: Any) -> None:
    """Let a scheduler set the rates of two groups over 12 steps, 3 of them warm-up.

    One that leaves every rate as it is passes, as `train.lr_schedule=constant` does.

    Args:
        cls: called as `cls(optimizer, **options)`, with `num_warmup_steps` and `num_training_steps` where it names
            them, see `rotexp.training.schedulers.Scheduler`.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    disturb(1)
    rates = _rates(cls, options, stepping=True)
    for row in rates:
        assert all(isinstance(rate, float) for rate in row), f"step: sets lr={row}, which are no floats"
        assert all(math.isfinite(rate) and rate >= 0.0 for rate in row), f"step: sets lr={row}; 0 or more is a rate"
    assert any(rate > 0.0 for row in rates for rate in row), "step: leaves every learning rate at zero"
    changed = [any(row[group] != rate for row in rates) for group, rate in enumerate(RATES)]
    assert len({*changed}) == 1, "step: changes the learning rates of some groups alone; set lr of every group"
    disturb(2)
    replayed = _rates(cls, options, stepping=False)
    assert replayed == rates, "step: sets other rates when the same calls are made again, as a resumed run makes them"


def _rates(cls: type[Any], options: dict[str, Any], *, stepping: bool) -> list[list[float]]:
    """Return the rates of every step.

    Args:
        stepping: whether the optimizer steps in between, which it does not when a run is resumed.
    """
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in RATES]
    optimizer = torch.optim.SGD(groups)
    with rule("cls(optimizer, **options)"):
        scheduler = cls(optimizer, **{**step_counts(cls, WARMUP, STEPS), **options})
    check_members(scheduler, Scheduler)
    rates = [[group["lr"] for group in optimizer.param_groups]]
    with rule("step"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(STEPS):
            if stepping:
                optimizer.step()
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
    return rates
