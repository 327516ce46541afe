"""The clip ratio of each group that leaves the least squared error, found by trying some."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.quant.grouping import computed, grouped_by
from rotexp.quant.quantizer import Quantizer

CLIP_RATIOS = tuple(1.0 - 0.025 * step for step in range(21))
SEARCH_CHUNK_ELEMENTS = 2**20


@torch.no_grad()
def search_clip_ratios(x: Tensor, *, quantizer: Quantizer, groups: int) -> Tensor:
    """Find each group's ratio in `CLIP_RATIOS` with the least squared error; the larger one where errors are equal.

    Works through about `SEARCH_CHUNK_ELEMENTS` elements at a time, so that it needs little memory beyond `x`.

    Args:
        x: `(..., width)`, floating point.
        groups: of a row, which must divide the width.

    Returns:
        The ratios, `(..., groups)`, float32 (float64 if `x` is).
    """
    grouped = grouped_by(x, groups=groups)
    rows = grouped.reshape(-1, grouped.shape[-1])
    chunks = torch.split(rows, max(1, SEARCH_CHUNK_ELEMENTS // grouped.shape[-1]))
    return torch.cat([_best_ratios(chunk, quantizer=quantizer) for chunk in chunks]).reshape(grouped.shape[:-1])


def _best_ratios(rows: Tensor, *, quantizer: Quantizer) -> Tensor:
    """Search the ratios of rows `(rows, group_size)`; return `(rows,)`."""
    rows = computed(rows)
    least_errors = rows.new_full(rows.shape[:1], torch.inf)
    best_ratios = torch.ones_like(least_errors)
    for ratio in CLIP_RATIOS:
        grid = quantizer.grid(rows, ratio)
        codes = grid.clamp_(quantizer.encode(rows, grid, clips=True))
        errors = torch.linalg.vector_norm(quantizer.decode(codes, grid.scale).sub_(rows), dim=-1)
        best_ratios[errors < least_errors] = ratio
        least_errors = torch.minimum(errors, least_errors)
    return best_ratios
