"""Count the collectives of a block, FSDP's included, and the bytes they move, and time an all-gather."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
NOT_COLLECTIVES = ("barrier", "wait_tensor", "monitored_barrier_")


@dataclass
class Collectives:
    """Collectives by torch's name of the operation, and the bytes of the largest tensor of each, added up."""

    counts: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def received_bytes(self, *, world_size: int) -> float:
        """Return what a rank receives over the wire: all but its own part; twice that for a ring's all-reduce."""
        share = (world_size - 1) / world_size
        return sum(share * moved * (2 if "allreduce" in name else 1) for name, moved in self.num_bytes.items())


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every collective that this rank issues inside the block, also those that FSDP issues in backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and let it run."""
        if func.namespace in NAMESPACES and _name(func) not in NOT_COLLECTIVES:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.seen.counts[_name(func)] += 1
            self.seen.num_bytes[_name(func)] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


@dataclass(frozen=True)
class Wire:
    """What an all-gather of a few bytes takes in seconds, and the bytes a second a rank receives by a large one."""

    seconds_per_call: float
    bytes_per_second: float


def measure_wire(*, large_bytes: int, device: torch.device, repetitions: int = 5) -> Wire:
    """Time all-gathers of a few bytes and of `large_bytes` (the gathered size) in the default group, of two or more."""
    world_size = dist.get_world_size()
    assert world_size > 1, "a world of one has no wire"
    small, large = (_all_gather_seconds(size, device, repetitions) for size in (4 * world_size, large_bytes))
    return Wire(small, large_bytes * (world_size - 1) / world_size / large)


def _all_gather_seconds(num_bytes: int, device: torch.device, repetitions: int) -> float:
    world_size = dist.get_world_size()
    part = torch.zeros(max(1, num_bytes // 4 // world_size), device=device)
    gathered = torch.zeros(part.numel() * world_size, device=device)
    seconds = []
    for _ in range(repetitions + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather_into_tensor(gathered, part)
        gathered[0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
