"""Words that many messages need: long lists shortened, types of numbers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def few(names: Iterable[str], *, most: int = 3) -> str:
    """Return names as a short line: the first of them, and how many more there are."""
    named = list(names)
    more = len(named) - most
    return ", ".join(named[:most]) + (f" and {more} more" if more > 0 else "")


def few_faults(faults: Iterable[str], *, most: int = 6) -> str:
    """Return faults, which may have commas, as a short line: the first of them, and how many more there are."""
    named = list(faults)
    more = len(named) - most
    return "; ".join(named[:most] + ([f"and {more} more"] if more > 0 else []))


def dtype_name(dtype: torch.dtype) -> str:
    """Return what configs and messages call a type of numbers: `float32`."""
    return str(dtype).removeprefix("torch.")
