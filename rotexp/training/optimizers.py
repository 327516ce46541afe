"""Two optimizers, one step: rotations on their manifold, everything else by AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.optim.protocol import ManifoldOptimizer
from rotexp.training.options import AdamWConfig
from rotexp.training.schedulers import scheduler_of

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
        self.rotations: ManifoldOptimizer | None = _on_the_manifold(rotations, config) if rotations else None
        self.weights = adamw(weights, config.adamw, rate=config.train.params.rate) if weights else None
        self._both: list[Any] = [optimizer for optimizer in (self.rotations, self.weights) if optimizer is not None]
        self._schedulers = [scheduler_of(optimizer, config.train) for optimizer in self._both]
        self._scheduled = 0

    @property
    def uses_gradient_length(self) -> bool:
        """Whether a longer gradient of a rotation makes another step."""
        return bool(getattr(self.rotations, "uses_gradient_length", True))

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
        self._scheduled += 1

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
        numbers = {
            name: {key: value for key, value in state.items() if isinstance(value, (bool, int, float))}
            for name, state in self._states()
        }
        return {"numbers": {name: held for name, held in numbers.items() if held}, "scheduled": self._scheduled}

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Take over what `facts` returned, before the first step; the learning rates follow the present schedule."""
        numbers, scheduled = _of_before(facts) if "steps" in facts else (facts["numbers"], facts["scheduled"])
        for name, state in self._states():
            state.update(numbers.get(name, {}))
        while self._scheduled < scheduled:
            self.schedule()

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for optimizer in self._both:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield self._names[parameter], optimizer.state[parameter]


def _of_before(facts: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the numbers of a state, and how often rates were scheduled, as checkpoints had them at first."""
    return {name: {"step": step} for name, step in facts["steps"].items()}, facts["schedulers"][0]["last_epoch"]


def _on_the_manifold(rotations: Mapping[str, Tensor], config: Config) -> ManifoldOptimizer:
    """Return the rotations' optimizer, its state there from the start, so that it can be loaded into."""
    optimizer: ManifoldOptimizer = build(config.optimizer, list(rotations.values()))
    for rotation in rotations.values():
        optimizer.state[rotation] = optimizer.initial_state(rotation)
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
