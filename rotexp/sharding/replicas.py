"""What several ranks hold alike: compared by digests, measured where those differ, overwritten by the first replica's.

A plain tensor is held by all ranks of the world, a shard of a two-dimensional mesh by those along its first axis; other
shards have no replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from rotexp.errors.wording import few
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import local_rows
from rotexp.sharding.state_dicts import collective_device

WORDS = 63
"""Numbers of 8 bytes in a row of what is digested: odd, lest a column of a matrix have an even number in every row."""
ROW_BYTES = 8 * WORDS
LOW_HALF = 2**32 - 1
CHUNK_ELEMENTS = 2**22
MOST_NAMES = 6


@dataclass(frozen=True)
class Divergence:
    """How far replicas are apart; the same on every rank.

    Attributes:
        differences: of what differs, by name, the largest difference between two replicas; infinite where a number is
            finite on one alone, and zero where only bits differ, such as the sign of a zero.
        ranks: the ranks that differ from the first replica.
    """

    differences: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def max_abs_diff(self) -> float:
        """The largest difference of all."""
        return max(self.differences.values(), default=0.0)

    @property
    def names(self) -> tuple[str, ...]:
        """What differs."""
        return tuple(self.differences)

    def joined(self, later: Divergence) -> Divergence:
        """Return what differed now or later, each by its later difference."""
        ranks = sorted({*self.ranks, *later.ranks})
        return Divergence({**self.differences, **later.differences}, tuple(ranks))

    def line(self) -> str:
        """Return it as one line for people."""
        names = few(self.names, most=MOST_NAMES)
        ranks = ", ".join(map(str, self.ranks))
        return f"{names} differ from the first replica's on rank {ranks} by up to {self.max_abs_diff:.1e}"


@torch.no_grad()
def compare(tensors: Mapping[str, Tensor], *, communication: Communication) -> Divergence:
    """Compare replicas by digests of 8 bytes each (one collective); only where those differ, number by number.

    Args:
        tensors: those of one rank, under the same names on all; what has no replicas is passed over.
    """
    held = {name: tensor for name, tensor in tensors.items() if _replicas(tensor, communication).world_size > 1}
    if not held:
        return Divergence()
    digests = _Digests(held, communication)
    names = digests.differing()
    if not names:
        return Divergence()
    return Divergence(_differences({name: held[name] for name in names}, communication), digests.odd_ranks())


@torch.no_grad()
def copy_first(tensors: Mapping[str, Tensor], *, communication: Communication) -> None:
    """Give every rank the first replica's numbers, bit for bit, by one collective a tensor; all ranks together."""
    device = collective_device(communication)
    for tensor in tensors.values():
        rows = local_rows(tensor)
        rows.copy_(_replicas(tensor, communication).broadcast_(rows.to(device).contiguous()))


def bit_digest(tensor: Tensor) -> Tensor:
    """Return an int64 scalar that differs when any single number of the tensor differs in any bit.

    Bit patterns of 8 bytes, times an odd number each, are added up over a row, and what rows come to likewise, modulo
    2⁶⁴: no change of 8 bytes is lost, since none times an odd number is a multiple of 2⁶⁴. In between, what a row comes
    to is changed one to one, its high half spread over the low one: the highest bits of 8 bytes have equal weights,
    so that an even number of changes would be lost wherever they are, such as the signs of a column of numbers. Now
    they are lost only where every row has an even number of them: so may columns of matrices of up to 32 numbers in a
    row, and of 62; of single float32 columns at orders from 40 to 199, those of 62 alone were.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    flat = flat.clone() if flat.storage_offset() * flat.element_size() % 8 else flat
    single = flat.view(torch.uint8)
    whole = len(single) // ROW_BYTES * ROW_BYTES
    rest = pad(single[whole:], (0, ROW_BYTES - len(single) + whole))
    odd = torch.arange(1, 2 * WORDS, 2, device=single.device)
    sums = torch.cat([_row_sums(part.view(torch.int64).view(-1, WORDS), odd) for part in (single[:whole], rest)])
    spread = (sums >> 32).bitwise_and_(LOW_HALF).bitwise_xor_(sums)
    return spread.mul_(torch.arange(1, 2 * WORDS * len(sums), 2 * WORDS, device=sums.device)).sum()


def _row_sums(words: Tensor, odd: Tensor) -> Tensor:
    """Return the sums (rows,) of words (rows, WORDS) times odd numbers (WORDS,), reading each word once.

    A CPU does it as a product; accelerators have none of integers.
    """
    return words @ odd if words.device.type == "cpu" else _row_sums_in_parts(words, odd)


def _row_sums_in_parts(words: Tensor, odd: Tensor) -> Tensor:
    """Return the same by element-wise products of few rows at a time, which take little memory and stay in caches."""
    return torch.cat([(part * odd).sum(1) for part in torch.split(words, CHUNK_ELEMENTS // WORDS)])


class _Digests:
    """This rank's digests, placed in a table of those of all shards, so that one collective compares them all."""

    def __init__(self, tensors: Mapping[str, Tensor], communication: Communication) -> None:
        self.communication = communication
        self.names = [name for name, tensor in tensors.items() for _ in range(_place(tensor).shards)]
        self.device = collective_device(communication)
        self.digests = torch.stack([bit_digest(local_rows(tensor)).to(self.device) for tensor in tensors.values()])
        places = [_place(tensor) for tensor in tensors.values()]
        starts = torch.tensor([0, *(place.shards for place in places)]).cumsum(0)[:-1]
        self.indices = (starts + torch.tensor([place.shard for place in places])).to(self.device)
        self.first = torch.tensor([place.first(communication) for place in places], device=self.device)

    def differing(self) -> list[str]:
        """Return the names whose digests differ between replicas of some shard."""
        mine = torch.stack([self._table(self.digests), self._table(~self.digests)])
        highest, inverted_lowest = self.communication.reduce_(mine, "max")
        apart = (highest != ~inverted_lowest).tolist()
        return list(dict.fromkeys(name for name, differs in zip(self.names, apart, strict=True) if differs))

    def odd_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a digest other than the first replica's."""
        lowest = torch.full_like(self.digests, torch.iinfo(torch.int64).min)
        first = self.communication.reduce_(self._table(torch.where(self.first, self.digests, lowest)), "max")
        odd = torch.zeros(self.communication.world_size, device=self.device)
        odd[self.communication.rank] = (first[self.indices] != self.digests).any()
        return tuple(self.communication.reduce_(odd, "max").nonzero().flatten().tolist())

    def _table(self, values: Tensor) -> Tensor:
        table = torch.full((len(self.names),), torch.iinfo(torch.int64).min, device=self.device)
        return table.scatter_(0, self.indices, values)


@dataclass(frozen=True)
class _Place:
    """Which of how many shards this rank holds, and of which replica; None where the whole world holds one."""

    shard: int
    shards: int
    replica: int | None

    def first(self, communication: Communication) -> bool:
        return (communication.rank if self.replica is None else self.replica) == 0


def _place(tensor: Tensor) -> _Place:
    if not isinstance(tensor, DTensor):
        return _Place(0, 1, None)
    mesh = tensor.device_mesh
    replica, shard = (mesh.get_local_rank(axis) for axis in (0, mesh.ndim - 1))
    return _Place(shard, mesh.size(mesh.ndim - 1), replica)


def _replicas(tensor: Tensor, communication: Communication) -> Communication:
    """Return the ranks that hold the same: all, those of one shard, or this one alone."""
    if not isinstance(tensor, DTensor):
        return communication
    mesh = tensor.device_mesh
    return communication.over(mesh.get_group(0)) if mesh.ndim > 1 else Communication()


def _differences(tensors: Mapping[str, Tensor], communication: Communication) -> dict[str, float]:
    """Return the largest difference between two replicas of each."""
    device = collective_device(communication)
    largest = [_difference(local_rows(tensor), _replicas(tensor, communication), device) for tensor in tensors.values()]
    agreed = communication.reduce_(torch.stack(largest), "max").tolist()
    return dict(zip(tensors, agreed, strict=True))


def _difference(rows: Tensor, replicas: Communication, device: torch.device) -> Tensor:
    """Return max|a − b| over replicas, a float64 scalar."""
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in torch.split(rows.reshape(-1), CHUNK_ELEMENTS):
        numbers = chunk.to(device, torch.float64).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        highest, lowest = (replicas.reduce_(numbers.clone(), operation) for operation in ("max", "min"))
        apart = (highest - lowest).nan_to_num(nan=0.0, posinf=torch.inf)
        largest = torch.maximum(largest, apart.max()) if len(apart) else largest
    return largest
