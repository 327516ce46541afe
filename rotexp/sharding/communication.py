"""The collectives rotexp itself issues, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns of the old names, which are all that earlier versions know.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communication:
    """Collectives over the whole world, which move nothing between ranks in a world of one.

    Attributes:
        num_collectives, num_bytes: issued so far, and what this rank gave to them.
        threads: CPU threads that every rank has at least.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1, device: torch.device | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_collectives = 0
        self.num_bytes = 0
        self.threads = torch.get_num_threads()
        fewest = torch.tensor(self.threads, device=device)
        self.threads = int(self.reduce_(fewest, "min"))

    def reduce_(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """All-reduce in place by `sum`, `min` or `max`, and return the tensor."""
        if self.world_size > 1:
            self._count(tensor)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation.upper()))
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor by rank 0's, in place, and return it."""
        if self.world_size > 1:
            self._count(tensor)
            dist.broadcast(tensor, src=0)
        return tensor

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> Tensor:
        """Overwrite `piece` (n,) by this rank's n numbers of the sum of all ranks' `whole` (world * n,), return it."""
        if self.world_size == 1:
            return piece.copy_(whole)
        self._count(whole)
        REDUCE_SCATTER(piece, whole)
        return piece

    def all_gather(self, whole: Tensor, piece: Tensor) -> Tensor:
        """Overwrite `whole` (world * n,) by the `piece` (n,) of every rank, in their order, and return it."""
        if self.world_size == 1:
            return whole.copy_(piece)
        self._count(piece)
        ALL_GATHER(whole, piece)
        return whole

    @contextmanager
    def equal_threads(self) -> Iterator[None]:
        """Compute with as many CPU threads as every other rank, since the thread count decides the last bits."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _count(self, tensor: Tensor) -> None:
        self.num_collectives += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
