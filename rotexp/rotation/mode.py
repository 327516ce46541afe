"""What the rotated model computes at the moment: rotated or not, quantized or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Mode:
    """The switches every consumer of one model shares; both off is the float model."""

    rotate: bool = False
    quantize: bool = False

    @contextmanager
    def set(self, *, rotate: bool, quantize: bool) -> Iterator[None]:
        """Compute so inside the block, and as before after it."""
        before = self.rotate, self.quantize
        self.rotate, self.quantize = rotate, quantize
        try:
            yield
        finally:
            self.rotate, self.quantize = before
