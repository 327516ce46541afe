"""Parts as a user writes them, beside a folder of configs; the tests of plug-ins name them by `_target_`."""

from __future__ import annotations

import os as os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, StepLR

from rotexp.data.corpora import Corpus
from rotexp.optim.cayley_sgd import CayleySGD as CayleySGD
from rotexp.orthogonal.stiefel import cayley_exact, polar_projection


class HeavyBall(torch.optim.Optimizer):
    """Cayley steps along an average of skew generators; counts its steps as a number, and as a tensor."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05, beta: float = 0.9, nesterov: bool = False) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "nesterov": nesterov})

    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return {"average": torch.zeros_like(rotation), "power": torch.ones((), device=rotation.device), "steps": 0}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for rotation in group["params"]:
                if rotation.grad is not None:
                    self._move(rotation, group)

    def _move(self, rotation: Tensor, group: dict[str, Any]) -> None:
        state = self.state[rotation]
        if not state:
            state.update(self.initial_state(rotation))
        half = rotation.grad @ rotation.mT
        generator = half - half.mT
        state["average"].lerp_(generator / generator.norm(dim=(-2, -1), keepdim=True), 1 - group["beta"])
        state["power"] *= group["beta"]
        state["steps"] += 1
        direction = state["average"] / (1 - state["power"])
        rotation.copy_(cayley_exact(direction * group["lr"], rotation))

    @torch.no_grad()
    def project(self) -> None:
        for group in self.param_groups:
            for rotation in group["params"]:
                rotation.copy_(polar_projection(rotation))


class NoProject(torch.optim.SGD):
    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return {}


class Raising(HeavyBall):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.05) -> None:
        raise KeyError("shape")


class Needing(HeavyBall):
    def __init__(self, params: Iterable[Tensor], beta: float) -> None:
        super().__init__(params, beta=beta)


class Listing(HeavyBall):
    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return {"history": []}


class NoOptimizer:
    def __init__(self, params: Iterable[Tensor], lr: float = 0.05) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None: ...

    zero_grad = project = step

    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return {}


def function(params: Iterable[Tensor]) -> None: ...


class Sharpened:
    """Cross entropy at a temperature."""

    distills = False

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        logits = model.logits(token_ids)[:, :-1].float() / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())


class Trapezoid(LambdaLR):
    """Up over the warm-up, level, and down over the last share of the steps."""

    def __init__(self, optimizer: Any, num_warmup_steps: int, num_training_steps: int, decay: float = 0.5) -> None:
        falling = max(1, round(decay * num_training_steps))

        def share(step: int) -> float:
            return min((step + 1) / (num_warmup_steps + 1), (num_training_steps - step) / falling, 1.0)

        super().__init__(optimizer, share)


class Stairs(StepLR):
    """One of torch's, which knows of no warm-up and of no last step."""


class Householder:
    """A reflection along a direction that seed and name draw."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        direction = F.normalize(torch.randn(*shape[:-1], 1, generator=generator, dtype=torch.float64), dim=-2)
        return self.scale * (torch.eye(shape[-1], dtype=torch.float64) - 2 * direction @ direction.mT)


class Halves:
    """A text cut in the middle."""

    def __init__(self, path: str, minimum: int = 1) -> None:
        self.path = Path(path)

    def read(self) -> Corpus:
        text = self.path.read_text(encoding="utf-8")
        return Corpus(text[: len(text) // 2], text[len(text) // 2 :])
