"""NF4, the 4-bit NormalFloat of QLoRA (Dettmers et al., 2023, arXiv:2305.14314), as a format of one's own."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.quant.quantizer import Grid, Quantizer, even_grid

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values, quantiles of the normal distribution, as the paper's appendix E lists them."""


class NF4(Quantizer):
    """Nearest of the 16 values, scaled by the group's largest magnitude; the paper's groups have 64 numbers."""

    code_range = (0, len(LEVELS) - 1)
    learns_clip_ratio = True

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        """Take the largest magnitude for the scale."""
        return even_grid(groups.abs().amax(-1, keepdim=True) * clip, self.code_range)

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        """Return the place of the nearest value, and one beyond the first or last for magnitudes above the scale."""
        levels = _levels(groups)
        scaled = (groups / grid.scale).contiguous()
        codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(groups.dtype)
        return codes.add_(scaled > 1.0).sub_((scaled < -1.0).to(codes.dtype)) if clips else codes

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Look the values up."""
        return _levels(scale)[codes.int()].mul_(scale)


def _levels(like: Tensor) -> Tensor:
    return torch.tensor(LEVELS, dtype=like.dtype, device=like.device)
