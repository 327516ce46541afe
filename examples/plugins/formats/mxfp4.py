"""MXFP4 of the OCP Microscaling Formats Specification 1.0: groups of 32 numbers E2M1 with one power of two, E8M0."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.quant.quantizer import Grid, Quantizer

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1; a code is the place of a number's magnitude here, with its sign."""

LARGEST_EXPONENT = 2
"""Of E2M1."""

SCALE_EXPONENTS = (-127, 127)
"""Of E8M0."""


class MXFP4(Quantizer):
    """The conversion of the specification's section 6.3: magnitudes beyond the last one saturate.

    The largest magnitude in a group, of exponent e, is scaled into [4, 8); so clipping is part of the format.
    """

    code_range = (1 - len(MAGNITUDES), len(MAGNITUDES) - 1)
    group_size = 32
    clips = True
    takes_clip_ratio = False

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:  # noqa: ARG002
        """Return 2 to the floored binary logarithm of the largest magnitude, less E2M1's largest exponent.

        A group of NaN or infinity has the scale NaN; one of zeros has any. Scales go down to 2⁻¹²⁷, a subnormal number
        of float32, and so do values: where a device flushes those to zero, so does this format.
        """
        largest = groups.abs().amax(-1, keepdim=True)
        exponents = torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT
        scale = torch.ldexp(torch.ones_like(largest), exponents.clamp(*SCALE_EXPONENTS))
        scale.masked_fill_(~largest.isfinite(), torch.nan)
        lowest, highest = (torch.full_like(scale, code) for code in self.code_range)
        return Grid(scale, lowest, highest)  # even_grid would take a subnormal scale for that of zeros

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:  # noqa: ARG002
        """Round to nearest, ties to even, in steps of ½ below 2, of 1 below 4 and of 2 from there on."""
        scaled = (groups / grid.scale).nan_to_num_(nan=0.0)
        magnitude = scaled.abs()
        binade = (magnitude >= 2.0).to(scaled.dtype) + (magnitude >= 4.0)  # 0, 1 or 2
        codes = torch.ldexp(magnitude, 1 - binade).round_().add_(2 * binade)
        return codes.mul_(scaled.sign())

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Look the magnitudes up."""
        magnitudes = torch.tensor(MAGNITUDES, dtype=scale.dtype, device=scale.device)
        return magnitudes[codes.abs().int()].mul_(codes.sign()).mul_(scale)
