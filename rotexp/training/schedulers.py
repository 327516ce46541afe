"""How learning rates go over the steps: one of transformers' schedules, or the user's own."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import get_scheduler

from rotexp.config.targets import build
from rotexp.training.options import TrainConfig


class Scheduler(Protocol):
    """Sets `lr` of an optimizer's groups; made as `cls(optimizer, num_warmup_steps, num_training_steps, **options)`.

    Making it sets those of the first step. One is made for rotations and one for weights. It depends on nothing but
    its arguments and how often `step` was called: a resumed run calls it as often again, under its present options.
    Every `torch.optim.lr_scheduler.LRScheduler` is one. `rotexp.testing.check_scheduler` tries one.
    """

    def step(self) -> None:
        """Go on to the learning rates of the next step."""
        ...


def scheduler_of(optimizer: Any, train: TrainConfig) -> Scheduler:
    """Return what schedules an optimizer's learning rates: `train.scheduler`, or else `train.lr_schedule`."""
    if train.scheduler is not None:
        own: Scheduler = build(train.scheduler, optimizer, train.warmup_steps, train.steps)
        return own
    named: Scheduler = get_scheduler(
        train.lr_schedule.name, optimizer, num_warmup_steps=train.warmup_steps, num_training_steps=train.steps
    )
    return named
