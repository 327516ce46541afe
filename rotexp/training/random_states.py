"""The random states of one rank: those of torch on the host and on its accelerator, of NumPy and of Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save_random_states(path: Path) -> None:
    """Write the states of now, as tensors and plain lists."""
    version, numbers, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "accelerator": _accelerator_state(),
        "numpy": _numpy_state(),
        "python": [version, list(numbers), next_gauss],
    }
    torch.save(states, path)


def load_random_states(path: Path) -> bool:
    """Restore the states of a file, all or, where one is of an accelerator and the other of none, none of them."""
    states: dict[str, Any] = torch.load(path, weights_only=True)
    if (states["accelerator"] is None) != (_accelerator_state() is None):
        return False
    torch.set_rng_state(states["torch"])
    if states["accelerator"] is not None:
        _device_module().set_rng_state(states["accelerator"])
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    return True


def _numpy_state() -> list[Any]:
    state: Any = np.random.get_state()  # a tuple, although its type says that it may be a mapping
    return [torch.from_numpy(state[1].astype(np.int64)), *state[2:]]


def _accelerator_state() -> torch.Tensor | None:
    state: torch.Tensor | None = _device_module().get_rng_state() if torch.accelerator.is_available() else None
    return state


def _device_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
