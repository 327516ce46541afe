"""Integers of 2 to 8 bits as a format: affine grids, symmetric or with a zero point."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rotexp.quant.grouping import grouped_by
from rotexp.quant.quantizer import Grid, Quantizer, even_grid, nonzero


class QuantizedTensor(NamedTuple):
    """A tensor in integer form.

    Attributes:
        codes: `(..., width)`, uint8 if asymmetric, int8 if symmetric.
        scale: `(..., groups)`, float32 (float64 for a float64 tensor).
        zero: `(..., groups)`, the zero points, of the dtype of `codes`; all 0 if symmetric.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `(codes - zero) * scale`, shape `(..., width)`: the values that fake quantization gives."""
        codes = grouped_by(self.codes, groups=self.scale.shape[-1]).to(self.scale.dtype)
        values = codes.sub_(self.zero.unsqueeze(-1)).mul_(self.scale.unsqueeze(-1))
        return values.flatten(-2).to(dtype)


class Integers(Quantizer):
    """Codes times a scale; codes are less their zero point, which saves adding and subtracting it.

    Affine grids as in Jacob et al., arXiv:1712.05877, equation 1 and section 3; the range always includes zero.
    """

    learns_clip_ratio = True

    def __init__(self, bits: int, *, symmetric: bool) -> None:
        """Take the width of a code, and whether it is signed with zero point 0 or unsigned with a zero point."""
        self.symmetric = symmetric
        self.highest = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
        self.code_range = (-self.highest - 1, self.highest) if symmetric else (-self.highest, self.highest)

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        """Derive scales, and where codes end once the zero point is taken off."""
        # Two reductions, since torch.aminmax over a dimension is not vectorized on CPU and takes ten times as long.
        minimum = groups.amin(-1, keepdim=True)
        maximum = groups.amax(-1, keepdim=True)
        if self.symmetric:
            return even_grid(torch.maximum(maximum, -minimum) * clip / self.highest, self.code_range)
        minimum = minimum.clamp_(max=0.0) * clip
        maximum = maximum.clamp_(min=0.0) * clip
        scale = nonzero((maximum - minimum) / self.highest)
        zero = torch.div(-minimum, scale).round_()
        return Grid(scale, 0 - zero, self.highest - zero)

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        """Divide and round.

        Codes whose range was not shrunk can only lie one above it, and only if asymmetric: division and rounding are
        monotonic and odd, so the least value is rounded to `lowest` exactly (asymmetric), and the largest magnitude to
        `highest` or its negative (symmetric).
        """
        codes = torch.div(groups, grid.scale).round_()
        return codes if clips or self.symmetric else torch.minimum(codes, grid.highest, out=codes)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Multiply in place."""
        return codes.mul_(scale)

    def quantized(self, codes: Tensor, grid: Grid) -> QuantizedTensor:
        """Return the integer form of bounded codes, `(..., groups, group_size)`, which are overwritten."""
        dtype = torch.int8 if self.symmetric else torch.uint8
        zero = (self.highest - grid.highest).to(dtype)
        codes = codes.add_(self.highest - grid.highest)
        return QuantizedTensor(codes.flatten(-2).to(dtype), grid.scale.squeeze(-1), zero.squeeze(-1))
