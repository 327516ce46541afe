"""What torch.distributed.checkpoint asks to save and to load a flat state that holds `SplitVector` beside tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rotexp.sharding.local_rows import local_rows
from rotexp.sharding.split_vector import SplitVector
from rotexp.sharding.state_dicts import State


class SavePlanner(DefaultSavePlanner):
    """Writes what this rank holds: of a DTensor its rows, of a `SplitVector` its pieces."""

    def __init__(self, state: State, *, copied: bool) -> None:
        """Take what is to be written.

        Args:
            copied: whether to copy it into host memory at once, so that it may change before it is written.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = {name: _held(value, copied=copied) for name, value in state.items()}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return what is written under an index."""
        return _at(self._held[index.fqn], index)


class LoadPlanner(DefaultLoadPlanner):
    """Reads into what this rank holds, in place, whatever the world that saved it.

    The state must have been checked against the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state and the checkpoint's metadata."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads."""
        assert self.metadata is not None
        tensors = {name: value for name, value in self.state_dict.items() if not isinstance(value, SplitVector)}
        plan = create_default_local_load_plan(tensors, self.metadata)
        items = list(plan.items)
        for name in self.state_dict.keys() - tensors.keys():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, self.state_dict[name].__create_chunk_list__())
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return what is read into under an index."""
        value = self.state_dict[index.fqn]
        return _at(value, index) if isinstance(value, SplitVector) else super().lookup_tensor(index)


def _held(value: Tensor | SplitVector, *, copied: bool) -> Tensor | SplitVector:
    if isinstance(value, SplitVector):
        return replace(value, tensors=[_host_copy(tensor) for tensor in value.tensors]) if copied else value
    return _host_copy(local_rows(value)) if copied else local_rows(value)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _at(value: Tensor | SplitVector, index: MetadataIndex) -> Tensor:
    return value.__get_tensor_shard__(index) if isinstance(value, SplitVector) else value
