"""What the rotated model computes at the moment: rotated or not, quantized or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard

from rotexp.rotation.bank import Rotation

UNPREPARED = "norms are not folded yet, so the rotated model would compute something else; prepare the model first"
BROKEN = "the proof failed, so the model no longer computes what it did; load the model anew"


@dataclass
class Mode:
    """The switches every consumer of one model shares; both off is the float model.

    Attributes:
        refusal: why the model may not be rotated, if it may not.
        within: names of the rotations that, while inputs are quantized, act within the inputs' quantizers alone.
    """

    rotate: bool = False
    quantize: bool = False
    refusal: str | None = None
    within: frozenset[str] = frozenset()

    def turns(self, rotation: Rotation | None) -> TypeGuard[Rotation]:
        """Return whether a rotation now turns what flows from its writers to its readers."""
        return rotation is not None and self.rotate and not self.acts_within(rotation)

    def acts_within(self, rotation: Rotation | None) -> TypeGuard[Rotation]:
        """Return whether a rotation now acts within its readers' quantizers alone (see `rotexp.rotation.within`)."""
        return rotation is not None and self.rotate and self.quantize and rotation.name in self.within

    @contextmanager
    def set(self, *, rotate: bool, quantize: bool) -> Iterator[None]:
        """Compute so inside the block, and as before after it.

        Raises:
            ValueError: the model may not be rotated: it is not prepared, or is no longer what it was.
        """
        if rotate and self.refusal is not None:
            raise ValueError(f"mode.rotate=True: {self.refusal}")
        before = self.rotate, self.quantize
        self.rotate, self.quantize = rotate, quantize
        try:
            yield
        finally:
            self.rotate, self.quantize = before
