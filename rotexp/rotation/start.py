"""What rotations start from: Hadamard, Haar or identity matrices, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rotexp.config.targets import build
from rotexp.errors.library import refused
from rotexp.rotation.bank import draw
from rotexp.rotation.options import RotationConfig

TOLERANCE = 1e-4
"""Largest |R Rᵀ − I| of a start; float32 keeps a matrix of order 8192 within a tenth of it."""


class RotationStart(Protocol):
    """Draws what R1 and R2 start from; made of its options. `rotexp.testing.check_start` tries one."""

    def __call__(self, shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
        """Return an orthogonal matrix, the same at every call with the same arguments, on every rank.

        Args:
            shape: (n, n), or (blocks, n, n) of orthogonal blocks.
            name: of the rotation, `R1` or `R2_0`, `R2_1`, …
            seed: the run's.

        Returns:
            Of that shape, float32 or float64, on the CPU; it is used in float32.
        """
        ...


Draw = Callable[[str, tuple[int, ...]], Tensor]
"""Draws the start of the rotation of a name and a shape."""


def drawing(rotation: RotationConfig, *, seed: int) -> Draw:
    """Return what draws the starts of a run's rotations: `rotation.start`, or else `rotation.init`.

    Raises:
        ValueError: in the draw, there is none of that kind, or it is not an orthogonal matrix of that shape.
    """
    if rotation.start is None:
        kind = rotation.init.name
        return lambda name, shape: draw_start(kind, shape, name=name, seed=seed)
    own: RotationStart = build(rotation.start)
    return lambda name, shape: _draw_own(own, shape, name=name, seed=seed, target=rotation.start.target)


def draw_start(kind: str, shape: torch.Size | tuple[int, ...], *, name: str, seed: int) -> Tensor:
    """Draw the start of a rotation of a kind of rotexp's own: (n, n) or (blocks, n, n), float32."""
    return draw(kind, shape[-1], name=name, seed=seed, blocks=shape[0] if len(shape) == 3 else None)


def fault_of_start(matrix: object, shape: tuple[int, ...]) -> str:
    """Return in words why something is no start of that shape; empty if it is one."""
    if not isinstance(matrix, Tensor):
        return f"is a {type(matrix).__name__} and no tensor"
    if tuple(matrix.shape) != shape:
        return f"has the shape {tuple(matrix.shape)} and not {shape}"
    if matrix.dtype not in (torch.float32, torch.float64):
        return f"has the dtype {matrix.dtype} and not float32 or float64"
    exact = matrix.detach().double()
    error = (exact @ exact.mT - torch.eye(shape[-1], dtype=torch.float64, device=exact.device)).abs().max().item()
    return "" if error <= TOLERANCE else f"is {error:.1e} from orthogonal (max|R Rᵀ − I|)"


def _draw_own(own: RotationStart, shape: tuple[int, ...], *, name: str, seed: int, target: str) -> Tensor:
    where = f"rotation.start._target_={target}"
    with refused(lambda reason: f"{where}: cannot draw {name} ({reason}); change its options, or correct it"):
        matrix = own(shape, name=name, seed=seed)
    if fault := fault_of_start(matrix, shape):
        raise ValueError(f"{where}: what it draws for {name} {fault}; correct it")
    return matrix.detach().float().contiguous()
