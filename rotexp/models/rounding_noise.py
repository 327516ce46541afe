"""Rounding noise: a token embedding whose weights are each moved to the next number of their dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rotexp.models.arch import embedding_name
from rotexp.sharding.digest import CHUNK_ELEMENTS, INTEGERS
from rotexp.sharding.local_rows import local_rows, row_slice

INCREMENT = 0x9E3779B97F4A7C15 - 2**64
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""Constants of SplitMix64 (Steele, Lea and Flood 2014), as int64 has them."""


@torch.no_grad()
def perturb_embedding(model: nn.Module, *, seed: int) -> None:
    """Move every weight of the token embedding to the next number of its dtype, up or down, in place.

    Which of the two depends on seed, row and column alone, so every rank moves the rows it holds as any sharding would.
    Zeros stay, as do numbers that have none next to them.
    """
    weight = model.get_parameter(f"{embedding_name(model)}.weight")
    rows = local_rows(weight)
    if rows.numel() == 0:
        return
    first, width = row_slice(weight).start, rows.shape[1]
    columns = torch.arange(width, device=rows.device)
    per_chunk = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, len(rows), per_chunk):
        chunk = rows[start : start + per_chunk]
        numbers = torch.arange(first + start, first + start + len(chunk), device=rows.device)
        _move(chunk, _steps(seed, numbers, columns))


def _move(values: Tensor, steps: Tensor) -> None:
    """Add steps of 1 or -1 to the bit patterns of values, where that is the next number towards infinity or zero."""
    bits = values.view(INTEGERS[values.element_size()])
    moved = (bits + steps.to(bits.dtype)).view(values.dtype)
    values.copy_(torch.where((values != 0) & moved.isfinite(), moved, values))


def _steps(seed: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Return 1 or -1 for each of the numbers of rows (r,) and columns (c,): (r, c) int64."""
    hashed = _mixed(torch.full_like(rows, seed) * INCREMENT)
    hashed = _mixed(hashed + rows * INCREMENT)
    hashed = _mixed(hashed[:, None] + columns * INCREMENT)
    return 1 - 2 * (hashed < 0).to(torch.int64)


def _mixed(values: Tensor) -> Tensor:
    """Return int64 of which every bit depends on every bit of the values."""
    for shift, factor in MIXING:
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right, zeros following."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
