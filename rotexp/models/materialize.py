"""Give a model on the meta device its memory and its weights, each rank only the rows it holds."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from rotexp.models.checkpoint import Checkpoint
from rotexp.sharding.shards import local_rows, row_slice


@torch.no_grad()
def materialize(model: nn.Module, checkpoint: Checkpoint, *, device: torch.device, added: Collection[str] = ()) -> None:
    """Allocate every meta parameter on `device`, move what is real there, and read the weights row by row.

    Args:
        model: built by `build_model`, sharded or not; its parameters keep their checkpoint names.
        added: names of parameters that the checkpoint does not have; they become zeros.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]

    def allocate(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    model._apply(allocate)  # type: ignore[no-untyped-call]
    for name in empty:
        parameter = model.get_parameter(name)
        if name in added:
            local_rows(parameter).zero_()
        else:
            local_rows(parameter).copy_(checkpoint.read(name, row_slice(parameter)))
