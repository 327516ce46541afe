"""Computes what several linears need of the one tensor they all read once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

Result = TypeVar("Result")


class SharedInput:
    """Held by the linears that read one tensor (queries, keys and values; gate and up; router and experts).

    They join once, in a fixed order. The result lives until the last reader has taken it, the tensor has died, or a
    reader comes with another one. It is taken for the same tensor object, unchanged in place, in the same grad mode and
    by each reader once: a reader that comes again begins anew, so a graph that was freed by a backward pass is not met
    twice. Tensors of inference mode have no version and are not shared. Copies and pickles are empty.

    Attributes:
        num_readers: how many have joined.
    """

    def __init__(self) -> None:
        self.num_readers = 0
        self._entry: _Entry | None = None

    def join(self) -> int:
        """Count one reader more, and return its number."""
        self.num_readers += 1
        return self.num_readers - 1

    def __call__(self, x: Tensor, *, reader: int, kind: Hashable, compute: Callable[[Tensor], Result]) -> Result:
        """Return `compute(x)`, computed now or for an earlier reader.

        Args:
            x: what all of them read.
            reader: the number of the one that asks.
            kind: what is computed, equal only where `compute` does the same: all on which it depends besides x.
            compute: a function of x.
        """
        if self.num_readers == 1 or torch.compiler.is_compiling() or x.is_inference():
            return compute(x)
        entry = self._entry
        if entry is None or not entry.serves(x, reader):
            entry = self._entry = _Entry(x, self._forget)
        if kind not in entry.results:
            entry.results[kind] = compute(x)
        entry.readers.add(reader)
        if len(entry.readers) == self.num_readers:
            self._entry = None
        result: Result = entry.results[kind]
        return result

    def _forget(self, source: WeakIdRef) -> None:
        if self._entry is not None and self._entry.source is source:
            self._entry = None

    def __getstate__(self) -> dict[str, Any]:
        return {"num_readers": self.num_readers, "_entry": None}


class _Entry:
    """The results for one tensor, by kind, and who has taken one."""

    def __init__(self, x: Tensor, forget: Callable[[WeakIdRef], None]) -> None:
        self.source = WeakIdRef(x, forget)
        self.state = _state(x)
        self.results: dict[Hashable, Any] = {}
        self.readers: set[int] = set()

    def serves(self, x: Tensor, reader: int) -> bool:
        return self.source() is x and self.state == _state(x) and reader not in self.readers


def _state(x: Tensor) -> tuple[int, bool]:
    return x._version, torch.is_grad_enabled()
