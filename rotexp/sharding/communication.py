"""The collectives that rotexp itself issues, counted; those of FSDP2 and of checkpoints are their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns of the old names, which are all that earlier versions know.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Counts:
    """Collectives that this rank took part in, and the bytes it gave to them.

    It gives the whole tensor to an all-reduce, a reduce-scatter and an all-to-all (what it keeps for itself included),
    its piece to an all-gather, and to a broadcast the tensor if it is the rank that sends.
    """

    num_collectives: int = 0
    num_bytes: int = 0


class Communication:
    """Collectives over the whole world, which move nothing between ranks in a world of one.

    Attributes:
        rank, world_size: of this process, and how many there are; within the group, for `over` a group.
        threads: CPU threads by which ranks compute what must be alike.
    """

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, device: torch.device | None = None, threads: int | None = None
    ) -> None:
        """Take this rank's place in the world.

        Args:
            device: what the group's backend moves (None: as the host's).
            threads: see the attribute (None: as many as every rank has).
        """
        self.rank = rank
        self.world_size = world_size
        self._group: dist.ProcessGroup | None = None
        self._counts = Counts()
        self.threads = threads or torch.get_num_threads()
        fewest = torch.tensor(self.threads, device=device)
        self.threads = int(self.reduce_(fewest, "min"))

    @classmethod
    def of_world(cls, device: torch.device | None = None) -> Communication:
        """Return that of the process group which this process has joined, or of a world of one.

        Args:
            device: what the group's backend moves (None: as the host's, which is right for gloo).
        """
        if not dist.is_initialized():
            return cls(device=device)
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)

    def over(self, group: dist.ProcessGroup) -> Communication:
        """Return the same over some of the ranks, this one among them; all collectives count together."""
        part = copy(self)
        part._group, part.rank, part.world_size = group, group.rank(), group.size()
        return part

    @property
    def num_collectives(self) -> int:
        """Issued so far, over any group."""
        return self._counts.num_collectives

    @property
    def num_bytes(self) -> int:
        """What this rank gave to them, as `Counts` defines it."""
        return self._counts.num_bytes

    def reduce_(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """All-reduce in place by `sum`, `min` or `max`, and return the tensor."""
        if self.world_size > 1:
            self._count(tensor)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation.upper()), group=self._group)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor by the first rank's, in place, and return it."""
        if self.world_size > 1:
            self._count(tensor if self.rank == 0 else None)
            dist.broadcast(tensor, group_src=0, group=self._group)
        return tensor

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> Tensor:
        """Overwrite `piece` (n,) by this rank's n numbers of the sum of all ranks' `whole` (world * n,), return it."""
        if self.world_size == 1:
            return piece.copy_(whole)
        self._count(whole)
        REDUCE_SCATTER(piece, whole, group=self._group)
        return piece

    def all_gather(self, whole: Tensor, piece: Tensor) -> Tensor:
        """Overwrite `whole` (world * n, …) by the `piece` (n, …) of every rank, in their order, and return it."""
        if self.world_size == 1:
            return whole.copy_(piece)
        self._count(piece)
        ALL_GATHER(whole, piece, group=self._group)
        return whole

    def all_to_all(self, sent: Tensor) -> Tensor:
        """Return what every rank has for this one: (world, …), of which rank r's entry is its `sent[this rank]`."""
        if self.world_size == 1:
            return sent.clone()
        received = torch.empty_like(sent)
        self._count(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    @contextmanager
    def equal_threads(self) -> Iterator[None]:
        """Compute with as many CPU threads as every other rank.

        Their number decides the last bits of steps of wide rotations: of orders from about 160 on (torch 2.13, oneMKL).
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _count(self, given: Tensor | None) -> None:
        self._counts.num_collectives += 1
        self._counts.num_bytes += 0 if given is None else given.numel() * given.element_size()
