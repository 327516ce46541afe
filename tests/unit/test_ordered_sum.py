"""Sums in the order of their terms' numbers, against the tree written down as it is defined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotexp.sharding.communication import Communication
from rotexp.sharding.ordered_sum import OrderedSum, places, sum_over_ranks


def terms(count: int) -> list[Tensor]:
    """Return vectors whose sum depends on its order."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(5, generator=generator) * 10.0 ** (number % 7) for number in range(count)]


def tree(values: list[Tensor]) -> Tensor:
    """Return the sum of halves, the first of which is the largest power of two."""
    if len(values) == 1:
        return values[0]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return tree(values[:half]) + tree(values[half:])


@pytest.mark.parametrize("count", [*range(1, 18), 31, 32, 33, 100])
def test_terms_are_added_as_a_tree(count: int) -> None:
    values, found = terms(count), OrderedSum()
    for value in values:
        found.add(value)
    assert torch.equal(found.total(), tree(values))
    assert torch.equal(sum_over_ranks(found.totals(), count=count, communication=Communication()), tree(values))


def test_the_order_matters_to_these_terms() -> None:
    values = terms(33)
    assert not torch.equal(tree(values), sum(values[1:], start=values[0]))


@pytest.mark.parametrize("first", range(20))
def test_what_is_left_of_any_neighbours_are_their_places(first: int) -> None:
    for count in range(1, 20):
        found = OrderedSum(first=first)
        for value in terms(count):
            found.add(value)
        within = places(first, count)
        assert [place for place, _ in found._subtrees] == within
        covered = [(place.index << place.level) + offset for place in within for offset in range(1 << place.level)]
        assert covered == list(range(first, first + count))


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 3), (3, 1), (3, 2), (4, 3), (5, 7), (8, 4)])
def test_ranks_subtrees_come_to_the_same_tree(ranks: int, count: int) -> None:
    values, joined = terms(ranks * count), OrderedSum()
    for rank in range(ranks):
        own = OrderedSum(first=rank * count)
        for value in values[rank * count : (rank + 1) * count]:
            own.add(value)
        for place, total in zip(places(rank * count, count), own.totals(), strict=True):
            joined.append(place, total)
    assert torch.equal(joined.total(), tree(values))
