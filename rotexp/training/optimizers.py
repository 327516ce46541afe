"""Two optimizers, one step: rotations on their manifold, everything else by AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import get_scheduler

from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.training.options import AdamWConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, beside its count of steps."""


class Optimizers:
    """Steps rotations and weights together; either may be absent.

    Attributes:
        rotations: steps the bank (None: no rotation is trained).
        weights: AdamW (None: nothing else is trained).
    """

    def __init__(self, rotations: Mapping[str, Tensor], weights: Mapping[str, Tensor], config: Config) -> None:
        """Take what is trained, by name: rotations, and weights (DTensors, tensors, or a master's shard)."""
        self._names = {parameter: name for name, parameter in (*rotations.items(), *weights.items())}
        self.rotations = _on_the_manifold(rotations, config) if rotations else None
        self.weights = adamw(weights, config.adamw, rate=config.train.params.rate) if weights else None
        self._both = [optimizer for optimizer in (self.rotations, self.weights) if optimizer is not None]
        self._schedulers = [
            get_scheduler(
                config.train.lr_schedule.name,
                optimizer,
                num_warmup_steps=config.train.warmup_steps,
                num_training_steps=config.train.steps,
            )
            for optimizer in self._both
        ]

    def step(self) -> None:
        """Move everything that has a gradient."""
        for optimizer in self._both:
            optimizer.step()

    def schedule(self) -> None:
        """Go on to the learning rates of the next step."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # where a step is skipped
            for scheduler in self._schedulers:
                scheduler.step()

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for optimizer in self._both:
            optimizer.zero_grad()

    def project(self) -> None:
        """Replace every rotation by the orthogonal matrix nearest to it."""
        if self.rotations is not None:
            self.rotations.project()

    def learning_rates(self) -> dict[str, float]:
        """Return those of the present step."""
        named = {"train/lr": self.rotations, "train/lr_weights": self.weights}
        return {name: optimizer.param_groups[0]["lr"] for name, optimizer in named.items() if optimizer is not None}

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of their state, `NAME/KEY`; each shares the state's memory."""
        return {
            f"{name}/{key}": value
            for name, state in self._states()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def facts(self) -> dict[str, Any]:
        """Return the rest of their state, as JSON has it."""
        steps = {name: state["step"] for name, state in self._states() if isinstance(state.get("step"), int)}
        return {"steps": steps, "schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Take over what `facts` returned; the learning rates follow the present schedule."""
        for name, state in self._states():
            if name in facts["steps"]:
                state["step"] = facts["steps"][name]
        for optimizer, scheduler, saved in zip(self._both, self._schedulers, facts["schedulers"], strict=True):
            scheduler.last_epoch = saved["last_epoch"]
            scheduler._step_count = saved["_step_count"]
            scheduler._last_lr = [
                base * scale(scheduler.last_epoch)
                for base, scale in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for optimizer in self._both:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield self._names[parameter], optimizer.state[parameter]


def _on_the_manifold(rotations: Mapping[str, Tensor], config: Config) -> Any:
    """Return the rotations' optimizer, its momentum there from the start, so that it can be loaded into."""
    optimizer = build(config.optimizer, list(rotations.values()))
    for group in optimizer.param_groups:
        for rotation in group["params"] if group["momentum"] > 0.0 else ():
            optimizer.state[rotation]["momentum_buffer"] = torch.zeros_like(rotation)
    return optimizer


def adamw(weights: Mapping[str, Tensor], config: AdamWConfig, *, rate: str = "lr") -> AdamW:
    """Return AdamW over named weights, its moments there from the start, so that memory peaks where it stays.

    Sharded and whole parameters have groups of their own, since foreach and fused steps take one kind at a time.

    Args:
        rate: the name in `config` of the learning rate.
    """
    sharded = [weight for weight in weights.values() if isinstance(weight, DTensor)]
    whole = [weight for weight in weights.values() if not isinstance(weight, DTensor)]
    first, second = config.betas
    optimizer = AdamW(
        [{"params": group} for group in (sharded, whole) if group],
        lr=getattr(config, rate),
        betas=(first, second),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for weight in weights.values():
        moments = {name: torch.zeros_like(weight) for name in MOMENTS}
        optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
    return optimizer
