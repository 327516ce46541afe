"""How learning rates go over the steps: one of transformers' schedules, or the user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from transformers import get_scheduler

from rotexp.config.components import Component
from rotexp.config.signatures import named_by
from rotexp.config.targets import build, factory_of
from rotexp.training.options import TrainConfig


class Scheduler(Protocol):
    """Sets `lr` of an optimizer's groups; made as `cls(optimizer, **options)`.

    Where its constructor has parameters `num_warmup_steps` and `num_training_steps`, it is given them by these names.
    Making it sets the rates of the first step. One is made for rotations and one for weights. It depends on nothing but
    its arguments and how often `step` was called: a resumed run calls it as often again, under its present options.
    So is each of `torch.optim.lr_scheduler` that takes numbers alone, such as `StepLR`, but for `ReduceLROnPlateau`,
    whose `step` asks for a metric. `rotexp.testing.check_scheduler` tries one.
    """

    def step(self) -> None:
        """Go on to the learning rates of the next step."""
        ...


def scheduler_of(optimizer: Any, train: TrainConfig) -> Scheduler:
    """Return what schedules an optimizer's learning rates: `train.scheduler`, or else `train.lr_schedule`."""
    if train.scheduler is not None:
        own: Scheduler = build(own_scheduler(train), optimizer)
        return own
    named: Scheduler = get_scheduler(
        train.lr_schedule.name, optimizer, num_warmup_steps=train.warmup_steps, num_training_steps=train.steps
    )
    return named


def own_scheduler(train: TrainConfig) -> Component:
    """Return `train.scheduler` with the numbers of steps among its options, where its class names them."""
    part: Component = train.scheduler
    return replace(part, options={**step_counts(factory_of(part), train.warmup_steps, train.steps), **part.options})


def step_counts(cls: Any, num_warmup_steps: int, num_training_steps: int) -> dict[str, int]:
    """Return the numbers of steps that a scheduler's class names, as keyword arguments."""
    return named_by(cls, {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps})
