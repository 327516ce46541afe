"""The options of numerics: whether a run's figures depend on how it is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Numerics(Enum):
    """What decides the order in which gradients, losses and figures are added up."""

    fast = "fast"
    exact = "exact"


@dataclass(frozen=True)
class NumericsConfig:
    """Whether a run's figures depend on how it is spread over ranks.

    Attributes:
        mode: under `exact` rotations, losses, gradient norms, checkpoints and held-out figures are the same bits for
            every sharding, world size, number of nodes and place of a micro-batch, of the same size: of one block
            unless `train.micro_batch_size` says another. Under `fast` they are the same up to rounding.
    """

    mode: Numerics = Numerics.fast

    @property
    def exact(self) -> bool:
        """Whether figures are the same bits in every world."""
        return self.mode is Numerics.exact
