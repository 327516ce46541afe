"""A logical vector of which each rank holds some pieces, saved and loaded like a sharded tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True, eq=False)
class SplitVector:
    """This rank's pieces of a vector; those of all ranks cover it, and where two begin alike they are the same.

    Follows torch's protocol of checkpointable objects (`torch.distributed._checkpointable`); since it is no tensor,
    `rotexp.training.planners` looks its pieces up.

    Attributes:
        size: length of the whole vector.
        offsets: where each piece begins in it, ascending.
        tensors: (length,) each, none empty, sharing the memory of what this rank holds.
    """

    size: int
    offsets: list[int]
    tensors: list[Tensor]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Return what this rank writes, for a planner that saves."""
        return [self._write_item(name, *piece) for piece in zip(self.offsets, self.tensors, strict=True)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return where this rank's pieces lie, for a planner that loads."""
        return [_chunk(*piece) for piece in zip(self.offsets, self.tensors, strict=True)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the piece that begins at an index."""
        assert index.offset is not None
        return self.tensors[self.offsets.index(index.offset[0])]

    def _write_item(self, name: str, offset: int, tensor: Tensor) -> WriteItem:
        data = TensorWriteData(
            chunk=_chunk(offset, tensor),
            properties=TensorProperties.create_from_tensor(tensor),
            size=torch.Size([self.size]),
        )
        return WriteItem(index=MetadataIndex(name, torch.Size([offset])), type=WriteItemType.SHARD, tensor_data=data)


def _chunk(offset: int, tensor: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([offset]), sizes=tensor.shape)
