"""The sizes of a linear and of its rotations, by which costs are counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """The sizes of one linear and of its rotations.

    Attributes:
        inputs, outputs: the weight is (outputs, inputs).
        input_order: n of an input rotation made of (n, n) blocks; 0 for none.
        output_order: likewise for the output rotation.
        rotated_outputs: how many outputs the output rotation acts on; None for all.
    """

    inputs: int
    outputs: int
    input_order: int = 0
    output_order: int = 0
    rotated_outputs: int | None = None

    @property
    def rotated_rows(self) -> int:
        """How many outputs the output rotation acts on."""
        return self.outputs if self.rotated_outputs is None else self.rotated_outputs
