"""The options of rotations: which act, what they start from, whether they are trained."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from rotexp.errors.requirements import MISSING, require


class RotationInit(Enum):
    """What a rotation starts from."""

    hadamard = "hadamard"
    random = "random"
    identity = "identity"


@dataclass(frozen=True)
class RotationConfig:
    """Which rotations act, what they start from, whether they are trained.

    Attributes:
        name: what tables and W&B call the option that was chosen.
        r1, r2, r3, r4: whether to place that rotation (None: where the model lets it exist, with a warning where not).
        block_size: order of the blocks of R1 and R4, for group and microscaling formats (None: one block).
        init: what R1 and R2 start from.
        path: a file of rotations to start from instead: `rotations.safetensors` of a run, or `R.bin`.
        start: a part of your own, by `_target_`, that draws what R1 and R2 start from, instead of `init`.
        learned: whether R1 and R2 are trained.
    """

    name: str = MISSING
    r1: bool | None = None
    r2: bool | None = None
    r3: bool | None = False
    r4: bool | None = False
    block_size: int | None = None
    init: RotationInit = RotationInit.hadamard
    path: str | None = None
    learned: bool = True
    start: Any = None

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        size = self.block_size
        require(size is None or size >= 2, "rotation.block_size", size, "at least 2 or null", "null is one block")
