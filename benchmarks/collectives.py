"""Count the collectives of a block, FSDP's included and the bytes they move."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
        if is_collective(func):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.seen.counts[short_name(func)] += 1
            self.seen.num_bytes[short_name(func)] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return func(*args, **(kwargs or {}))


def is_collective(func: Any) -> bool:
    """Return whether an operation of torch's dispatcher moves data between ranks."""
    return func.namespace in NAMESPACES and short_name(func) not in NOT_COLLECTIVES


def short_name(func: Any) -> str:
    """Return an operation's name without its namespace."""
    name: str = func._schema.name.partition("::")[2]
    return name
