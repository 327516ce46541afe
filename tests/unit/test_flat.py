"""Pieces of flattened tensors lie where the whole has them, share its memory, and can be cut by name."""

from __future__ import annotations

import torch

from rotexp.sharding.flat import flattened, split_by_name
from rotexp.sharding.split_vector import SplitVector


def test_a_whole_tensor_is_one_piece_that_shares_its_memory() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    pieces = flattened(tensor)
    assert (pieces.size, pieces.offsets) == (12, [0])
    pieces.tensors[0][5] = -1.0
    assert tensor[1, 1] == -1.0


def test_a_vector_and_one_number_are_pieces_too() -> None:
    for shape in ((7,), (1,)):
        pieces = flattened(torch.ones(shape))
        assert (pieces.size, pieces.offsets, pieces.tensors[0].tolist()) == (shape[0], [0], [1.0] * shape[0])


def test_an_empty_tensor_has_no_piece() -> None:
    assert flattened(torch.empty(0, 4)).tensors == []


def test_a_vector_is_cut_where_names_and_pieces_begin_and_end() -> None:
    """Of 13 numbers, rank 1 of 2 holds [3:6] and [9:12]; the names take 4, 0, 1 and 8 of them."""
    vector = torch.arange(13.0)
    pieces = SplitVector(13, [3, 9], [vector[3:6], vector[9:12]])
    cut = split_by_name(pieces, {"a": 4, "none": 0, "b": 1, "c": 8})
    assert {name: (part.size, part.offsets) for name, part in cut.items()} == {
        "a": (4, [3]),
        "none": (0, []),
        "b": (1, [0]),
        "c": (8, [0, 4]),
    }
    assert [tensor.tolist() for tensor in cut["c"].tensors] == [[5.0], [9.0, 10.0, 11.0]]
    cut["b"].tensors[0].fill_(-1.0)
    assert vector[4] == -1.0
