"""Sums in the order of their terms' numbers, so that it does not matter which rank had which terms.

Addition in floating point is not associative. Here terms are added as a binary tree that their numbers alone decide:
0 + 1, 2 + 3, then (0 + 1) + (2 + 3), and so on. A rank whose terms are neighbours adds up the subtrees that lie within
them, and only these few vectors travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotexp.sharding.communication import Communication


@dataclass(frozen=True)
class Place:
    """A subtree: of 2**`level` terms, from number `index` * 2**`level` on."""

    index: int
    level: int

    def follows(self, other: Place) -> bool:
        """Return whether both are halves of one subtree, and this is the second."""
        return self.level == other.level and self.index % 2 == 1 and self.index == other.index + 1

    @property
    def parent(self) -> Place:
        """The subtree of which this is a half."""
        return Place(self.index // 2, self.level + 1)


def places(first: int, count: int) -> list[Place]:
    """Return the largest subtrees that lie within `count` terms from number `first` on, in order."""
    found = []
    while count:
        level = count.bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)
        found.append(Place(first >> level, level))
        first, count = first + (1 << level), count - (1 << level)
    return found


class OrderedSum:
    """Adds up this rank's vectors, (n,), which come in the order of their numbers."""

    def __init__(self, *, first: int = 0) -> None:
        """Begin with the term of that number."""
        self._next = first
        self._subtrees: list[tuple[Place, Tensor]] = []

    def add(self, term: Tensor) -> None:
        """Add the next term, which must not be changed afterwards."""
        self.append(Place(self._next, 0), term)
        self._next += 1

    def append(self, place: Place, values: Tensor) -> None:
        """Add the sum of the next terms."""
        while self._subtrees and place.follows(self._subtrees[-1][0]):
            values = self._subtrees.pop()[1] + values
            place = place.parent
        self._subtrees.append((place, values))

    def totals(self) -> list[Tensor]:
        """Return the sums of the subtrees so far, in order."""
        return [values for _, values in self._subtrees]

    def total(self) -> Tensor:
        """Return the sum of all terms: what is left over at the end is added from its end on."""
        *others, total = self.totals()
        for values in reversed(others):
            total = values + total
        return total


def sum_over_ranks(totals: Sequence[Tensor], *, count: int, communication: Communication) -> Tensor:
    """Return the sum (n,) of the terms of all ranks, the same bits on each and in every world (two collectives).

    Every rank adds up a part of each vector, so that it receives about as much as by an all-reduce.

    Args:
        totals: an `OrderedSum`'s of this rank's terms, which are numbers rank * count to rank * count + count - 1.
        count: terms of each rank.
    """
    world_size, length = communication.world_size, len(totals[0])
    of_ranks = [places(rank * count, count) for rank in range(world_size)]
    width = -(-length // world_size)
    sent = totals[0].new_zeros(max(map(len, of_ranks)), width * world_size)
    for row, values in zip(sent, totals, strict=False):
        row[:length] = values
    received = communication.all_to_all(torch.unflatten(sent, 1, (world_size, width)).movedim(1, 0).contiguous())
    parts = OrderedSum()
    for of_rank, rows in zip(of_ranks, received, strict=True):
        for place, values in zip(of_rank, rows, strict=False):
            parts.append(place, values)
    return communication.all_gather(sent.new_empty(world_size * width), parts.total())[:length]
