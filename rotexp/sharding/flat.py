"""What a rank holds of a tensor, as pieces of the whole one flattened, so that any sharding can save for any other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from torch import Tensor

from rotexp.sharding.local_rows import local_rows, row_slice
from rotexp.sharding.split_vector import SplitVector


def flattened(tensor: Tensor, *, rows: Tensor | None = None) -> SplitVector:
    """Return this rank's rows of a sharded tensor, or all of a whole one, sharing their memory.

    Args:
        rows: others of the same shape in their place, such as a copy.
    """
    rows = (local_rows(tensor) if rows is None else rows).detach().reshape(-1)
    width = tensor.numel() // max(1, tensor.shape[0])
    start = row_slice(tensor).start * width
    return SplitVector(tensor.numel(), [start] if len(rows) else [], [rows] if len(rows) else [])


def split_by_name(vector: SplitVector, sizes: Mapping[str, int]) -> dict[str, SplitVector]:
    """Split one vector, of vectors laid end to end, into these, by name.

    Args:
        sizes: lengths, in the order in which the vectors lie.
    """
    ends = accumulate(sizes.values())
    return {name: _between(vector, end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


def _between(vector: SplitVector, start: int, stop: int) -> SplitVector:
    offsets, tensors = [], []
    for offset, tensor in zip(vector.offsets, vector.tensors, strict=True):
        first, last = max(start, offset), min(stop, offset + len(tensor))
        if first < last:
            offsets.append(first - start)
            tensors.append(tensor[first - offset : last - offset])
    return SplitVector(stop - start, offsets, tensors)
