"""States as flat mappings of names to shards: gathered whole on rank 0, spread from there, and compared by shape.

A state's value is a DTensor (a shard of rows), a `SplitVector` (pieces of a vector), or a plain tensor, which every
rank holds alike. Every function takes all ranks, and its outcome is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotexp.errors.wording import few_faults
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import write_rows
from rotexp.sharding.split_vector import SplitVector

State = Mapping[str, Tensor | SplitVector]
WINDOW = 2**24
"""How many numbers of a vector are moved at once."""
FAULT_BYTES = 2048
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Form:
    """What decides whether a saved value can be loaded into another.

    Attributes:
        shape: of the whole.
        dtype: None where this rank holds no piece of a vector.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def fits(self, own: Form) -> bool:
        """Return whether a value of this form can be loaded into one of the other without losing a bit."""
        if self.shape != own.shape or self.dtype is None or own.dtype is None:
            return self.shape == own.shape
        return torch.promote_types(self.dtype, own.dtype) == own.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}" if self.dtype else f"{list(self.shape)}"


def form(value: Tensor | SplitVector) -> Form:
    """Return the form of a state's value."""
    if isinstance(value, SplitVector):
        return Form((value.size,), value.tensors[0].dtype if value.tensors else None)
    return Form(tuple(value.shape), value.dtype)


@torch.no_grad()
def full_state(state: State, *, communication: Communication) -> dict[str, Tensor]:
    """Gather a state, one tensor at a time.

    Returns:
        Whole tensors in host memory on rank 0; nothing elsewhere.
    """
    first = communication.rank == 0
    full = {}
    for name in sorted(state):
        value = state[name]
        if isinstance(value, SplitVector):
            gathered = _gather_pieces(value, communication=communication)
        elif isinstance(value, DTensor):
            gathered = _gather(value, communication=communication)
        else:
            gathered = value.detach()
        if first:
            full[name] = gathered.to("cpu", copy=True)
    return full


@torch.no_grad()
def load_full_state(state: State, full: Mapping[str, Tensor], *, communication: Communication, what: str) -> None:
    """Overwrite every rank's shards in place by the whole tensors of rank 0.

    Args:
        full: host tensors on rank 0; looked at nowhere else.
        what: what is loaded, for the message.

    Raises:
        ValueError: a name is missing or unexpected, a shape another, or a dtype wider; every fault is named, on all
            ranks alike, and nothing is written.
    """
    first = communication.rank == 0
    check_state(
        state,
        {name: form(tensor) for name, tensor in full.items()} if first else None,
        communication=communication,
        what=what,
    )
    device = collective_device(communication)
    for name in sorted(state):
        value = state[name]
        if isinstance(value, SplitVector):
            _spread_pieces(value, full[name] if first else None, communication=communication)
            continue
        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
        communication.broadcast_(whole.copy_(full[name]) if first else whole)
        write_rows(value, whole) if isinstance(value, DTensor) else value.detach().copy_(whole)


def check_state(own: State, found: Mapping[str, Form] | None, *, communication: Communication, what: str) -> None:
    """Compare what there is to load with what it is loaded into.

    Args:
        found: the form of everything saved; None on a rank that does not know, as long as one does.
        what: what is loaded, for the message.

    Raises:
        ValueError: a name is missing or unexpected, a shape another, or a dtype wider; every fault is named, on all
            ranks alike.
    """
    if fault := agree(few_faults(_faults(own, found)) if found is not None else "", communication=communication):
        raise ValueError(f"{what}: {fault}")


def agree(fault: str, *, communication: Communication) -> str:
    """Return, on every rank, the fault of the first rank that has one; empty if none has."""
    if communication.world_size == 1:
        return fault
    device = collective_device(communication)
    rank = torch.tensor(communication.rank if fault else communication.world_size, device=device)
    first = int(communication.reduce_(rank, "min"))
    if first == communication.world_size:
        return ""
    text = torch.zeros(FAULT_BYTES, dtype=torch.uint8, device=device)
    if first == communication.rank:
        encoded = fault.encode()[:FAULT_BYTES]
        text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    agreed = bytes(communication.reduce_(text).tolist()).rstrip(b"\0")
    return agreed.decode(errors="ignore")


def collective_device(communication: Communication) -> torch.device:
    """Return where a tensor must lie to take part in a collective of the whole world."""
    if communication.world_size == 1 or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _faults(own: State, found: Mapping[str, Form]) -> list[str]:
    faults = [f"{name} is missing" for name in sorted(own.keys() - found.keys())]
    faults += [f"{name} is unexpected" for name in sorted(found.keys() - own.keys())]
    for name in sorted(own.keys() & found.keys()):
        if not found[name].fits(expected := form(own[name])):
            faults.append(f"{name} is {found[name]} instead of {expected}")
    return faults


def _gather(shard: DTensor, *, communication: Communication) -> Tensor:
    """Return the whole of what lies by rows, as FSDP2 divides them: equally many, until there are none left.

    A shard that lies in host memory is first copied to where the collective runs.
    """
    mesh, local = shard.device_mesh, shard.to_local()
    ranks = communication.over(mesh.get_group(mesh.ndim - 1))
    most = -(-len(shard) // ranks.world_size)
    piece = torch.zeros(most, *shard.shape[1:], dtype=shard.dtype, device=mesh.device_type)
    piece[: len(local)] = local
    whole = piece.new_empty(most * ranks.world_size, *shard.shape[1:])
    return ranks.all_gather(whole, piece)[: len(shard)]


def _gather_pieces(value: SplitVector, *, communication: Communication) -> Tensor:
    """Return the whole vector in host memory, on rank 0; elsewhere an empty one.

    Each window is the maximum of bytes that are alike where ranks hold them and zero elsewhere, so every bit arrives.
    """
    dtype = _agreed_dtype(value, communication=communication)
    device = collective_device(communication)
    windows = []
    for begin in range(0, value.size, WINDOW):
        window = torch.zeros(min(WINDOW, value.size - begin), dtype=dtype, device=device)
        for inside, part in _overlaps(value, begin, len(window)):
            window[inside] = part.to(device)
        communication.reduce_(window.view(torch.uint8), "max")
        if communication.rank == 0:
            windows.append(window.cpu())
    return torch.cat(windows) if windows else torch.empty(0, dtype=dtype)


def _spread_pieces(value: SplitVector, whole: Tensor | None, *, communication: Communication) -> None:
    dtype = _agreed_dtype(value, communication=communication)
    device = collective_device(communication)
    for begin in range(0, value.size, WINDOW):
        length = min(WINDOW, value.size - begin)
        window = torch.empty(length, dtype=dtype, device=device)
        if whole is not None:
            window.copy_(whole[begin : begin + length])
        communication.broadcast_(window)
        for inside, part in _overlaps(value, begin, length):
            part.copy_(window[inside])


def _overlaps(value: SplitVector, begin: int, length: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield where in a window of the vector this rank's pieces lie, and those parts of them."""
    for offset, tensor in zip(value.offsets, value.tensors, strict=True):
        start, stop = max(offset, begin), min(offset + len(tensor), begin + length)
        if start < stop:
            yield slice(start - begin, stop - begin), tensor[start - offset : stop - offset]


def _agreed_dtype(value: SplitVector, *, communication: Communication) -> torch.dtype:
    """Return the vector's dtype also on a rank that holds no piece of it."""
    index = DTYPES.index(value.tensors[0].dtype) if value.tensors else 0
    number = torch.tensor(index, device=collective_device(communication))
    return DTYPES[int(communication.reduce_(number, "max"))]
