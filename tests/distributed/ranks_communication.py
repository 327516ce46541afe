"""What the ranks of the communication's tests do: experiments, with torch's dispatcher watching."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from ranks_experiment import run_experiments
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rotexp
from rotexp.experiment import training_phase
from rotexp.rotation.own_rows import division
from rotexp.training import loop

TORCH = Path(dist.__file__).parent
OWNERS = {
    str(Path(rotexp.__file__).parent): "rotexp",
    str(TORCH / "fsdp"): "fsdp",
    str(TORCH / "checkpoint"): "checkpoint",
}
"""Folders of code that issues collectives: the innermost caller that lies in one decides whose a collective is."""
NOT_COLLECTIVES = ("barrier", "wait_tensor", "monitored_barrier_")


class Dispatched(TorchDispatchMode):
    """Counts collectives and what this rank gives to rotexp's, by who issued them."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = dict.fromkeys([*OWNERS.values(), "neither"], (0, 0))
        self.kinds: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in NOT_COLLECTIVES:
            owner = _owner()
            count, num_bytes = self.totals[owner]
            self.totals[owner] = count + 1, num_bytes + (_given(name, args) if owner == "rotexp" else 0)
            kind = f"{owner} {name}"
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def _owner() -> str:
    frame = sys._getframe()
    while frame is not None:
        for folder, owner in OWNERS.items():
            if frame.f_code.co_filename.startswith(folder):
                return owner
        frame = frame.f_back
    return "neither"


def _given(name: str, args: Any) -> int:
    """Return the bytes of what this rank puts in, by the schemas of c10d's operators."""
    if name == "broadcast_" and args[2] != dist.ProcessGroup.unbox(args[1]).rank():
        return 0
    inputs = args[0] if name in ("allreduce_", "broadcast_") else args[1]
    return sum(t.numel() * t.element_size() for t in tree_leaves(inputs) if isinstance(t, Tensor))


def count_steps(cases: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """Run each case, with all work divided that can be; return every step's row and what the dispatcher saw since."""
    with mock.patch.object(division, "multiply_adds_per_byte", return_value=0):
        return {name: _count(name, overrides, folder) for name, overrides in cases.items()}


def _count(name: str, overrides: list[str], folder: str) -> dict[str, Any]:
    dispatched, seen, rows = Dispatched(), [], []
    begin, row, train = loop.Meter.__init__, loop.Meter.row, training_phase.train

    def watched_begin(meter: Any, *args: Any) -> None:
        begin(meter, *args)
        seen.append(dict(dispatched.totals))

    def watched_row(meter: Any, *args: Any, **options: Any) -> dict[str, float]:
        rows.append(row(meter, *args, **options))
        seen.append(dict(dispatched.totals))
        return rows[-1]

    def watched_train(*args: Any, **options: Any) -> None:
        with dispatched:
            train(*args, **options)

    with (
        mock.patch.object(loop.Meter, "__init__", watched_begin),
        mock.patch.object(loop.Meter, "row", watched_row),
        mock.patch.object(training_phase, "train", watched_train),
    ):
        run_experiments({name: overrides}, folder)
    return {
        "said": [(row["comm/num_collectives"], row["comm/bytes"]) for row in rows],
        "seen": _between(seen),
        "kinds": dispatched.kinds,
        "neither": dispatched.totals["neither"],
    }


def _between(seen: list[dict[str, tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the collectives and bytes of rotexp's own between each moment and the one before it."""
    totals = [moment["rotexp"] for moment in seen]
    return [(now[0] - then[0], now[1] - then[1]) for then, now in pairwise(totals)]
