"""How the ZeRO-2 master lies in memory: parameters end to end in one vector, cut into buckets, those into pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

_MIB = 2**20
_FP32_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class Span:
    """Consecutive numbers of a parameter that lie in one bucket.

    Attributes:
        name: the parameter's.
        start: the first of them, in the flattened parameter.
        in_bucket: their place in the bucket.
        last: whether the parameter ends with them.
    """

    name: str
    start: int
    in_bucket: slice
    last: bool

    @property
    def in_parameter(self) -> slice:
        """Their place in the flattened parameter."""
        return slice(self.start, self.start + self.in_bucket.stop - self.in_bucket.start)


@dataclass(frozen=True)
class Bucket:
    """Consecutive numbers of the vector, moved by one collective.

    Attributes:
        start: the first of them, in the vector.
        width: how many of them each rank owns; the last bucket is padded to a multiple of the world.
        spans: what lies in it, in order.
    """

    start: int
    width: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Layout:
    """Parameters of these names and shapes, end to end in this order, over `world` ranks.

    Attributes:
        bucket_numel: of every bucket but the last, a multiple of the world.
    """

    shapes: Mapping[str, torch.Size]
    world: int
    bucket_numel: int

    @property
    def size(self) -> int:
        """How many numbers the parameters have."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def shard_size(self) -> int:
        """How many numbers each rank owns, padding included."""
        return shard_numel(self.size, world=self.world)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in order."""
        starts = range(0, self.size, self.bucket_numel)
        spans: list[list[Span]] = [[] for _ in starts]
        offset = 0
        for name, shape in self.shapes.items():
            begin, end = offset, offset + shape.numel()
            while offset < end:
                index, inside = divmod(offset, self.bucket_numel)
                numel = min(end - offset, self.bucket_numel - inside)
                place = slice(inside, inside + numel)
                spans[index].append(Span(name, offset - begin, place, last=offset + numel == end))
                offset += numel
        widths = [shard_numel(min(self.bucket_numel, self.size - start), world=self.world) for start in starts]
        return tuple(Bucket(*fields) for fields in zip(starts, widths, map(tuple, spans), strict=True))


def lay_out(shapes: Mapping[str, torch.Size], *, world: int, bucket_mib: float) -> Layout:
    """Cut parameters into buckets of at most `bucket_mib` MiB of float32, of at least one number a rank."""
    numel = int(bucket_mib * _MIB) // _FP32_BYTES
    return Layout(shapes, world, max(numel - numel % world, world))


def shard_numel(numel: int, *, world: int) -> int:
    """Return how many numbers each rank owns of `numel`, padding included."""
    return -(-numel // world)
