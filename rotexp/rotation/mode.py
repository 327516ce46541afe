"""What the rotated model computes at the moment: rotated or not, quantized or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

UNPREPARED = "norms are not folded yet, so the rotated model would compute something else; prepare the model first"
BROKEN = "the proof failed, so the model no longer computes what it did; load the model anew"


@dataclass
class Mode:
    """The switches every consumer of one model shares; both off is the float model.

    Attributes:
        refusal: why the model may not be rotated, if it may not.
    """

    rotate: bool = False
    quantize: bool = False
    refusal: str | None = None

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
