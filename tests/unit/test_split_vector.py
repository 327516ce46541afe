"""Pieces of a vector are saved and loaded by torch.distributed.checkpoint, cut otherwise if need be."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from rotexp.sharding.communication import Communication
from rotexp.sharding.split_vector import SplitVector
from rotexp.training.saved_state import Checkpoints, load


def cut(vector: Tensor, *bounds: int) -> SplitVector:
    """Cut a vector at the bounds; empty pieces are left out."""
    edges = [0, *bounds, len(vector)]
    cuts = [(start, vector[start:stop]) for start, stop in pairwise(edges) if start < stop]
    return SplitVector(len(vector), [start for start, _ in cuts], [piece for _, piece in cuts])


def test_what_is_written_is_where_the_pieces_lie() -> None:
    pieces = SplitVector(10, [2, 7], [torch.arange(3.0), torch.arange(2.0)])
    items = pieces.__create_write_items__("x", pieces)
    assert [(*item.index.offset, *item.tensor_data.chunk.sizes, *item.tensor_data.size) for item in items] == [
        (2, 3, 10),
        (7, 2, 10),
    ]
    assert pieces.__get_tensor_shard__(MetadataIndex("x", torch.Size([7]))) is pieces.tensors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_vector_is_read_into_other_pieces_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    communication = Communication()
    vector = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(dtype)
    vector[5], vector[6] = -0.0, torch.finfo(dtype).tiny / 4
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False, communication=communication)
    path = checkpoints.save(1, {"x": cut(vector, 4, 4, 30)}, facts={})
    read = torch.zeros(37, dtype=dtype)
    load(path, {"x": cut(read, 1, 13, 36)}, communication=communication)
    assert torch.equal(read.view(torch.uint8), vector.view(torch.uint8))


def test_a_piece_is_a_view_of_a_larger_tensor_and_only_it_is_written(tmp_path: Path) -> None:
    communication = Communication()
    held = torch.randn(1_000_000)
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False, communication=communication)
    path = checkpoints.save(1, {"x": SplitVector(10, [0], [held[50:60]])}, facts={})
    assert sum(file.stat().st_size for file in path.iterdir()) < 100_000
    read = torch.zeros(10)
    load(path, {"x": SplitVector(10, [0], [read])}, communication=communication)
    assert torch.equal(read, held[50:60])
