"""Give a model on the meta device its memory and its weights, each rank only the rows it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotexp.errors.wording import dtype_name
from rotexp.models.arch import is_tied, tie
from rotexp.models.stored_model import StoredModel
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import largest_magnitude, local_rows, row_slice
from rotexp.sharding.state_dicts import agree


def materialize(
    model: nn.Module,
    checkpoint: StoredModel,
    *,
    device: torch.device,
    added: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    communication: Communication | None = None,
) -> None:
    """Allocate every meta parameter on `device`, move what is real there, and read the weights row by row.

    Args:
        model: built by `build_model`, sharded or not; its parameters keep their checkpoint names, a tied head is one.
        added: names of parameters that the checkpoint does not have; they become zeros.
        compute_dtype: what FSDP casts sharded weights to where they are used, if that is not what they are held in.
        communication: over the ranks that read the same checkpoint, each its rows (None: this one alone).

    Raises:
        ValueError: a weight is not finite, or overflows a dtype, or cannot be read; on all ranks alike if it is so on
            one.
    """
    fault = ""
    try:
        _materialize(model, checkpoint, device=device, added=added, compute_dtype=compute_dtype)
    except ValueError as error:
        fault = str(error)
    if communication is not None:
        fault = agree(fault, communication=communication)
    if fault:
        raise ValueError(fault)


@torch.no_grad()
def _materialize(
    model: nn.Module,
    checkpoint: StoredModel,
    *,
    device: torch.device,
    added: Collection[str],
    compute_dtype: torch.dtype | None,
) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    tied = is_tied(model)
    model._apply(_allocator(device))  # type: ignore[no-untyped-call]
    if tied:
        tie(model)
    for name in empty:
        parameter = model.get_parameter(name)
        rows = local_rows(parameter)
        if name in added:
            rows.zero_()
            continue
        rows.copy_(checkpoint.read(name, row_slice(parameter)))
        _check(checkpoint, name, parameter, compute_dtype)


def _check(checkpoint: StoredModel, name: str, parameter: Tensor, compute_dtype: torch.dtype | None) -> None:
    """Raise ValueError if a parameter's rows are not finite where they are held, or where they are computed with."""
    used = {"model.dtype": parameter.dtype}
    if compute_dtype is not None and isinstance(parameter, DTensor):  # FSDP casts what it shards
        used["sharding.param_dtype"] = compute_dtype
    largest = largest_magnitude(local_rows(parameter))
    for key, dtype in used.items():
        if not largest <= torch.finfo(dtype).max:
            raise ValueError(_fault(checkpoint, name, row_slice(parameter), dtype, key=key))


def _allocator(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return what moves a tensor to a device, or gives a meta tensor memory there, once."""
    allocated: dict[Tensor, Tensor] = {}

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if tensor not in allocated:
            allocated[tensor] = torch.empty_like(tensor, device=device)
        return allocated[tensor]

    return allocate


def _fault(checkpoint: StoredModel, name: str, rows: slice, dtype: torch.dtype, *, key: str) -> str:
    """Say which stored tensor does not become finite numbers of a dtype, and why; it is read once more for that."""
    for part, of_part in checkpoint.stored_parts(name, rows):
        values = checkpoint.weights.read(part, of_part)
        largest = largest_magnitude(values)
        where = f"model.path={checkpoint.identity}: {checkpoint.weights.origin(part)}"
        if not math.isfinite(largest):
            spoiled = values.isinf() if math.isinf(largest) else values.isnan()
            row = int(spoiled.reshape(len(values), -1).any(1).nonzero()[0]) + (of_part.start or 0)
            return f"{where} holds {largest} (row {row}); fetch the model again, or repair it"
        if largest > torch.finfo(dtype).max:
            return f"{where}: {_overflow(largest, dtype, key=key)}"
    return f"model.path={checkpoint.identity}: {name} was not finite, and is when it is read again; fetch it again"


def _overflow(largest: float, dtype: torch.dtype, *, key: str) -> str:
    fits = dtype is torch.float16 and largest <= torch.finfo(torch.bfloat16).max
    remedy = f"set {key}=bfloat16" if fits else "scale the model down"
    limit = torch.finfo(dtype).max
    return f"max |w| = {largest:.5g} overflows {key}={dtype_name(dtype)}, largest {limit:.5g}; {remedy}"
