"""The one owner of every rotation, and the handles by which consumers reach it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rotexp.orthogonal.hadamard import random_hadamard, random_orthogonal
from rotexp.rotation.products import rotate_columns, rotate_rows


class RotationBank(nn.Module):
    """Every logical rotation once, as a float32 (or float64) parameter called by its name, in the order of adding.

    Registered once, at the root of a model, and kept outside FSDP's parameter groups. Consumers hold a `Rotation`.
    """

    def add(self, name: str, matrix: Tensor) -> Rotation:
        """Take ownership of a rotation.

        Args:
            name: a Python identifier such as `R1` or `R2_7`.
            matrix: (n, n), or (blocks, n, n) for a block-diagonal one whose blocks are learned apart; float32 or
                float64; a parameter is taken as it is, a tensor copied.

        Raises:
            ValueError: the name is taken, or the matrix is another rotation's, or of a shape or dtype not named above.
        """
        if not name.isidentifier() or hasattr(self, name):
            raise ValueError(f"rotation {name!r}: the name is taken or no identifier; choose another")
        if not _is_square(matrix) or matrix.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"rotation {name}: must be (n, n) or (blocks, n, n), float32 or float64, "
                f"not {matrix.dtype} {tuple(matrix.shape)}"
            )
        owner = next((other for other, parameter in self.items() if parameter is matrix), None)
        if owner is not None:
            raise ValueError(f"rotation {name}: its parameter is already {owner}; one parameter is one rotation")
        if not isinstance(matrix, nn.Parameter):
            matrix = nn.Parameter(matrix.detach().clone(memory_format=torch.contiguous_format))
        self.register_parameter(name, matrix)
        return Rotation(self, name)

    def __getitem__(self, name: str) -> nn.Parameter:
        parameter = self._parameters[name]
        assert parameter is not None
        return parameter

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __len__(self) -> int:
        return len(self._parameters)

    def items(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters in their fixed order."""
        return self.named_parameters(recurse=False)

    def prune(self, names: Iterable[str]) -> None:
        """Give up rotations that no consumer reads any more (after a merge)."""
        for name in tuple(names):
            delattr(self, name)

    @torch.no_grad()
    def assign(self, matrices: Mapping[str, Tensor]) -> None:
        """Overwrite the named rotations in place, all or none.

        Args:
            matrices: by name, each of its rotation's shape; any dtype and device.

        Raises:
            KeyError: there is no rotation of that name.
            ValueError: a matrix is not of its rotation's shape, not even one that would broadcast to it.
        """
        for name, matrix in matrices.items():
            if matrix.shape != self[name].shape:
                expected, given = tuple(self[name].shape), tuple(matrix.shape)
                raise ValueError(f"rotation {name}: its shape is {expected}, not {given}; give a matrix of that shape")
        for name, matrix in matrices.items():
            self[name].copy_(matrix)

    def snapshot(self) -> dict[str, Tensor]:
        """Return a detached copy of every rotation."""
        return {name: parameter.detach().clone() for name, parameter in self.items()}

    @contextmanager
    def holding(self, matrices: Mapping[str, Tensor]) -> Iterator[None]:
        """Hold other values inside the block, and the present ones, bit for bit, after it."""
        before = self.snapshot()
        try:
            self.assign(matrices)
            yield
        finally:
            self.assign(before)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotationBank:
        """Follow the model to a device, but never to another dtype."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        applied: RotationBank = super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return applied


class Rotation:
    """A handle on one rotation of a bank; not a module and not a parameter, so nothing registers it twice.

    It asks the bank by name at every use, so it survives moves, copies and loaded state dicts.
    """

    def __init__(self, bank: RotationBank, name: str) -> None:
        self.bank = bank
        self.name = name

    @property
    def matrix(self) -> Tensor:
        """The rotation: (n, n) or (blocks, n, n), the bank's dtype."""
        return self.bank[self.name]

    def rotate(self, values: Tensor) -> Tensor:
        """Return `values @ R`.

        R is the block-diagonal matrix of the rotation's blocks; an (n, n) rotation is repeated as often as it fits.

        Args:
            values: (..., m * n), with m the number of blocks if the rotation has its own; computed in the bank's
                dtype, returned in that of `values`.
        """
        return rotate_columns(values, self.matrix)

    def unrotate(self, values: Tensor) -> Tensor:
        """Return `values @ Rᵀ`, the inverse of `rotate`."""
        return rotate_columns(values, self.matrix.mT)

    def rotate_rows(self, weight: Tensor) -> Tensor:
        """Return `Rᵀ W`: what a linear must be whose output is rotated.

        Args:
            weight: (m * n, inputs), or (m * n,) for a bias, with m as in `rotate`.
        """
        columns = weight if weight.ndim > 1 else weight.unsqueeze(-1)
        return rotate_rows(columns, self.matrix, rows=None).reshape(weight.shape)


def _is_square(matrix: Tensor) -> bool:
    return matrix.ndim in (2, 3) and matrix.shape[-2] == matrix.shape[-1]


def draw(kind: str, order: int, *, name: str, seed: int, blocks: int | None = None) -> Tensor:
    """Draw the start of a rotation from a seed of its own name, so that neither order nor number of draws matters.

    Args:
        kind: `hadamard` (random signs), `random` (Haar) or `identity`.
        order: n.
        blocks: how many blocks of that order to draw, independently of each other; None for one whole matrix.

    Returns:
        (n, n), or (blocks, n, n), float32.

    Raises:
        ValueError: there is no Hadamard matrix of that order.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    draws: dict[str, Callable[[], Any]] = {
        "hadamard": lambda: random_hadamard(order, generator=generator),
        "random": lambda: random_orthogonal(order, generator=generator),
        "identity": lambda: torch.eye(order),
    }
    drawn: Tensor = draws[kind]() if blocks is None else torch.stack([draws[kind]() for _ in range(blocks)])
    return drawn
