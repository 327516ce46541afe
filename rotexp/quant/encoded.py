"""A quantized tensor as codes and grids: what a backward pass keeps, and what ranks gather."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rotexp.quant.grouping import computed, grouped_by
from rotexp.quant.quantizer import Grid, Quantizer, code_dtype


class EncodedTensor(NamedTuple):
    """What a backward pass needs of a quantized tensor, in a quarter of its float32 size (half for clipped 8 bits).

    Attributes:
        codes: `(..., width)`, int8, or int16 if the codes need it: one beyond the range where a value is clipped.
        grid: of the dtype in which it was computed.
        quantizer: what the codes are decoded by.
        clips: whether codes may lie beyond the range.
    """

    codes: Tensor
    grid: Grid
    quantizer: Quantizer
    clips: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes and grid, which autograd may save."""
        return self.codes, *self.grid

    def decode(self, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """Return the fake-quantized values, and where they are not clipped.

        Returns:
            values: `(..., width)` of `dtype`, what `FakeQuantizer.__call__` gives, except that -0.0 reads 0.0.
            passes: `(..., width)`, 1 where the straight-through gradient passes and 0 elsewhere, of the grid's dtype;
                None if it passes everywhere.
        """
        codes = self._computed_codes()
        if not self.clips:
            return self.quantizer.decode(codes, self.grid.scale).flatten(-2).to(dtype), None
        bounded = self.grid.clamp(codes)
        passes = codes.eq_(bounded).flatten(-2)
        return self.quantizer.decode(bounded, self.grid.scale).flatten(-2).to(dtype), passes

    def bounded(self) -> tuple[Tensor, Tensor]:
        """Return all that the values need: codes within the range, of the narrowest type, and scales, (..., groups)."""
        scale = self.grid.scale.squeeze(-1)
        if not self.clips:
            return self.codes, scale
        codes = self.grid.clamp_(self._computed_codes())
        return codes.flatten(-2).to(code_dtype(self.quantizer, clips=False)), scale

    def passes(self) -> Tensor | None:
        """Return where the values are not clipped, as `decode` does."""
        if not self.clips:
            return None
        codes = self._computed_codes()
        return codes.eq_(self.grid.clamp(codes)).flatten(-2)

    def _computed_codes(self) -> Tensor:
        return grouped_by(self.codes, groups=self.grid.scale.shape[-2]).to(self.grid.scale.dtype)


def encode(
    x: Tensor, *, quantizer: Quantizer, groups: int, clip: float | Tensor, clips: bool
) -> tuple[Tensor, EncodedTensor]:
    """Return the fake-quantized values, and in codes what a backward pass needs to form them again.

    Args:
        x: `(..., width)`, floating point.
        clip: as `Quantizer.grid` takes it.
        clips: whether values may lie outside the range.
    """
    codes, encoded = _encode(x, quantizer=quantizer, groups=groups, clip=clip, clips=clips)
    grid = encoded.grid
    values = quantizer.decode(grid.clamp_(codes) if clips else codes, grid.scale).flatten(-2).to(x.dtype)
    return values, encoded


def encode_codes(x: Tensor, *, quantizer: Quantizer, groups: int, clip: float | Tensor, clips: bool) -> EncodedTensor:
    """Return what `encode` does without the values."""
    return _encode(x, quantizer=quantizer, groups=groups, clip=clip, clips=clips)[1]


def _encode(
    x: Tensor, *, quantizer: Quantizer, groups: int, clip: float | Tensor, clips: bool
) -> tuple[Tensor, EncodedTensor]:
    """Return the codes in the dtype of the grid too, `(..., groups, group_size)`."""
    grouped = computed(grouped_by(x, groups=groups))
    grid = quantizer.grid(grouped, clip)
    codes = quantizer.encode(grouped, grid, clips=clips)
    grid.clamp_(codes, margin=int(clips))
    kept = codes.flatten(-2).to(code_dtype(quantizer, clips=clips))
    return codes, EncodedTensor(kept, grid, quantizer, clips)


def decode_into(target: Tensor, codes: Tensor, scale: Tensor, *, quantizer: Quantizer) -> None:
    """Write the values of bounded codes, in place where the format decodes so.

    Args:
        target: `(..., width)`, floating point.
        codes: `(..., width)`.
        scale: `(..., groups)`.
    """
    grouped = grouped_by(target, groups=scale.shape[-1])
    grouped.copy_(grouped_by(codes, groups=scale.shape[-1]))
    grouped.copy_(quantizer.decode(grouped, scale.unsqueeze(-1)))
