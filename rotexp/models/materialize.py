"""Give a model on the meta device its memory and its weights, each rank only the rows it holds."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from rotexp.models.arch import is_tied, tie
from rotexp.models.checkpoint import Checkpoint
from rotexp.sharding.shards import local_rows, row_slice


@torch.no_grad()
def materialize(model: nn.Module, checkpoint: Checkpoint, *, device: torch.device, added: Collection[str] = ()) -> None:
    """Allocate every meta parameter on `device`, move what is real there, and read the weights row by row.

    Args:
        model: built by `build_model`, sharded or not; its parameters keep their checkpoint names, a tied head is one.
        added: names of parameters that the checkpoint does not have; they become zeros.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    tied = is_tied(model)
    allocated: dict[Tensor, Tensor] = {}

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if tensor not in allocated:
            allocated[tensor] = torch.empty_like(tensor, device=device)
        return allocated[tensor]

    model._apply(allocate)  # type: ignore[no-untyped-call]
    if tied:
        tie(model)
    for name in empty:
        parameter = model.get_parameter(name)
        if name in added:
            local_rows(parameter).zero_()
        else:
            local_rows(parameter).copy_(checkpoint.read(name, row_slice(parameter)))
