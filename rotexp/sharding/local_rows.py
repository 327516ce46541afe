"""Read and write the rows of a parameter that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_rows(parameter: Tensor) -> Tensor:
    """Return the rows of a parameter that this rank holds, sharing their memory (all if it is not sharded)."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def row_slice(parameter: Tensor) -> slice:
    """Return which rows of the whole parameter this rank holds."""
    if not isinstance(parameter, DTensor):
        return slice(0, parameter.shape[0])
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])


def whole(parameter: Tensor) -> Tensor:
    """Return the whole parameter on every rank (a collective when it is sharded)."""
    gathered: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return gathered


def largest_magnitude(values: Tensor) -> float:
    """Return max|x|, nan where any number is one, 0 of none; without a copy, however many there are."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values.detach())
    return float(torch.maximum(-low, high))


@torch.no_grad()
def write_rows(parameter: Tensor, values: Tensor) -> None:
    """Store this rank's rows of `values`, which has the whole parameter's shape."""
    local_rows(parameter).copy_(values[row_slice(parameter)])


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter, so that those seen next are the shards themselves and not copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Hold the whole parameters of one sharded unit inside the block (a collective); writes to them are lost."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
