"""Count the collectives of a block, FSDP's included and the bytes they move."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
NOT_COLLECTIVES = ("barrier", "wait_tensor", "monitored_barrier_")


@dataclass
class Collectives:
    """Collectives by torch's name of the operation, and the bytes of the largest tensor of each, added up.

    Attributes:
        received_bytes: what a rank receives over the wire: all but its own part of the group's tensor; twice that for a
            ring's all-reduce. It sends as much.
    """

    counts: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    received_bytes: float = 0.0

    def add(self, name: str, num_bytes: int, *, ranks: int) -> None:
        """Count one collective over so many ranks."""
        self.counts[name] += 1
        self.num_bytes[name] += num_bytes
        self.received_bytes += num_bytes * (ranks - 1) / ranks * (2 if "allreduce" in name else 1)


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every collective that this rank issues inside the block, also those that FSDP issues in backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and let it run."""
        if is_collective(func):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            num_bytes = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
            self.seen.add(short_name(func), num_bytes, ranks=_group_size(args, kwargs))
        return func(*args, **(kwargs or {}))


def is_collective(func: Any) -> bool:
    """Return whether an operation of torch's dispatcher moves data between ranks."""
    return func.namespace in NAMESPACES and short_name(func) not in NOT_COLLECTIVES


def _group_size(args: Any, kwargs: Any) -> int:
    """Return over how many ranks a collective goes: its group is an argument, or the last of its texts names it."""
    leaves = tree_leaves((args, kwargs))
    objects = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
    groups = [dist.ProcessGroup.unbox(each) for each in objects if each._type().name() == "ProcessGroup"]  # type: ignore[attr-defined]
    names = [leaf for leaf in leaves if isinstance(leaf, str)]
    group: Any = groups[0] if groups else _resolve_process_group(names[-1])  # type: ignore[arg-type]
    return int(group.size())


def short_name(func: Any) -> str:
    """Return an operation's name without its namespace."""
    name: str = func._schema.name.partition("::")[2]
    return name
