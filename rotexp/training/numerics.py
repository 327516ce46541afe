"""The options of numerics: whether a run's figures depend on how it is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rotexp.errors.requirements import require


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
        noise_seed: moves every weight of the token embedding, as it was read, to the next number of `model.dtype`, up
            or down by that seed (None: not at all): runs that differ in it alone differ by rounding, amplified.
    """

    mode: Numerics = Numerics.fast
    noise_seed: int | None = None

    @property
    def exact(self) -> bool:
        """Whether figures are the same bits in every world."""
        return self.mode is Numerics.exact

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        seed = self.noise_seed
        require(
            seed is None or 0 <= seed < 2**32,
            "numerics.noise_seed",
            seed,
            "0 or more, below 2**32, or null",
            "null leaves the weights as they are",
        )
