"""Try the parts that training calls before a run starts: that each can be made, and has what its Protocol asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rotexp.config.schema import Config
from rotexp.config.targets import made
from rotexp.optim.protocol import ManifoldOptimizer
from rotexp.rotation.start import RotationStart
from rotexp.training.objectives.protocol import Objective
from rotexp.training.schedulers import Scheduler, own_scheduler

ORDER = 8
"""Of the rotation on which an optimizer is tried."""


def check_parts(config: Config) -> None:
    """Make every part that training calls.

    Raises:
        ValueError: one cannot be made of its options, or lacks what its Protocol asks for.
    """
    made(config.objective, key="objective", protocol=Objective)
    optimizer = _check_optimizer(config.optimizer)
    train, start = config.train, config.rotation.start
    if train.scheduler is not None:
        made(own_scheduler(train), optimizer, key="train.scheduler", protocol=Scheduler)
    if start is not None:
        made(start, key="rotation.start", protocol=RotationStart)


def _check_optimizer(component: Any) -> ManifoldOptimizer:
    rotation = nn.Parameter(torch.eye(ORDER))
    optimizer: ManifoldOptimizer = made(component, [rotation], key="optimizer", protocol=ManifoldOptimizer)
    if fault := fault_of_optimizer(optimizer, rotation):
        raise ValueError(f"optimizer._target_={component._target_}: {fault}; correct it")
    return optimizer


def fault_of_optimizer(optimizer: Any, rotation: Tensor) -> str:
    """Return in words what keeps an optimizer from being scheduled, or its state from checkpoints; empty if nothing."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return "does not derive from torch.optim.Optimizer, which schedulers ask for"
    if not all("lr" in group for group in optimizer.param_groups):
        return "has param_groups without lr, which schedulers set"
    state: dict[str, Any] = optimizer.initial_state(rotation)  # type: ignore[attr-defined]
    for name, value in state.items():
        if not isinstance(value, (Tensor, bool, int, float)):
            kind = type(value).__name__
            return f"its initial_state holds {name}, a {kind}; a checkpoint holds tensors, whole numbers and floats"
    return ""
