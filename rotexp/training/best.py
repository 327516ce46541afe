"""The state that did best so far, copied to host memory: rotations, and what this rank holds of trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """Why a state is the best so far.

    Attributes:
        step: after which it was measured (0: at the start), or, for a training loss, the step that it began.
        loss: in nats.
        by: the metric that was compared.
    """

    step: int
    loss: float
    by: str


class Best:
    """A copy of everything that is trained.

    Attributes:
        rotations: (n, n) or (blocks, n, n) each, by name.
        held: what this rank holds of every other trained tensor, by name.
    """

    def __init__(self, rotations: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Copy the values of now."""
        self.rotations = {name: _copied(matrix) for name, matrix in rotations.items()}
        self.held = {name: _copied(tensor) for name, tensor in held.items()}

    @torch.no_grad()
    def replace(self, rotations: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Copy the values of now over those of before; names and shapes are the same."""
        for copies, values in ((self.rotations, rotations), (self.held, held)):
            for name, value in values.items():
                copies[name].copy_(value)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
