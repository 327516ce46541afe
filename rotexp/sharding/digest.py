"""A digest of a model's weights that every sharding of them shares."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import local_rows, row_slice

CHUNK_ELEMENTS = 2**22
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def weights_digest(model: nn.Module, *, communication: Communication, ignored: Collection[Tensor] = ()) -> str:
    """Return 16 hex digits that differ when any single number of any weight does (one collective).

    Each weight counts as the sum of its bit patterns, times odd numbers of their row and their column, modulo 2⁶⁴;
    sums of rows add up over ranks.
    """
    weights = {name: p for name, p in model.named_parameters() if not any(p is other for other in ignored)}
    sums = torch.stack([_sum(weight) for weight in weights.values()])
    sharded = torch.tensor([isinstance(weight, DTensor) for weight in weights.values()], device=sums.device)
    added = communication.reduce_(torch.where(sharded, sums, 0)) if bool(sharded.any()) else torch.zeros_like(sums)
    totals = torch.where(sharded, added, sums).tolist()
    named = "\n".join(f"{name} {total}" for name, total in zip(weights, totals, strict=True))
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def _sum(weight: Tensor) -> Tensor:
    """Return what this rank adds to a weight's sum, an int64 scalar; a replica other than the first adds nothing."""
    rows = local_rows(weight)
    if rows.numel() == 0 or _replica(weight) > 0:
        return torch.zeros((), dtype=torch.int64, device=rows.device)
    bits = rows.reshape(len(rows), -1).view(INTEGERS[rows.element_size()])
    columns = _odd(0, bits.shape[1], rows.device)
    per_chunk = max(1, CHUNK_ELEMENTS // bits.shape[1])
    first = row_slice(weight).start
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for start in range(0, len(bits), per_chunk):
        chunk = bits[start : start + per_chunk].to(torch.int64)
        total += ((chunk * columns).sum(1) * _odd(first + start, len(chunk), rows.device)).sum()
    return total


def _replica(weight: Tensor) -> int:
    """Return which replica of a sharded weight this rank holds a part of."""
    coordinate = weight.device_mesh.get_coordinate() if isinstance(weight, DTensor) else None
    return sum(coordinate[:-1]) if coordinate else 0


def _odd(first: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(2 * first + 1, 2 * (first + count) + 1, 2, dtype=torch.int64, device=device)
