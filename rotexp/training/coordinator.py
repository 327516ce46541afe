"""Keep the rotations of all ranks alike: one start, one gradient, one norm, one clip, and the proof that it held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotexp.rotation.bank import RotationBank
from rotexp.sharding.communication import Communication


@dataclass(frozen=True)
class Divergence:
    """How far the ranks' rotations are apart.

    Attributes:
        max_abs_diff: the largest difference between two ranks.
        names: the rotations that differ.
    """

    max_abs_diff: float
    names: tuple[str, ...]


class Coordinator:
    """Acts for one bank over the whole data-parallel world."""

    def __init__(self, bank: RotationBank, communication: Communication) -> None:
        self.bank = bank
        self.communication = communication

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every rank the rotations of rank 0, bit for bit, by one collective."""
        parameters = [parameter for _, parameter in self.bank.items()]
        if not parameters or self.communication.world_size == 1:
            return
        flat = self.communication.broadcast_(_flatten(parameters))
        for parameter, values in zip(parameters, _split(flat, parameters), strict=True):
            parameter.copy_(values)

    @torch.no_grad()
    def consolidate(self, loss: Tensor) -> Tensor:
        """Average the rotations' gradients over all ranks by one all-reduce, once an optimizer step.

        The buffer holds every gradient in the bank's order, for each rotation whether this rank has one, and the loss.
        A rotation without a gradient on any rank keeps None.

        Args:
            loss: this rank's mean loss over its share of the global batch, a scalar.

        Returns:
            The mean loss over all ranks, a scalar.
        """
        parameters = [parameter for _, parameter in self.bank.items() if parameter.requires_grad]
        if not parameters or self.communication.world_size == 1:
            return loss
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        presence = torch.tensor([float(p.grad is not None) for p in parameters], device=loss.device)
        flat = _flatten([*gradients, presence, loss.reshape(1)])
        self.communication.reduce_(flat).div_(self.communication.world_size)
        *means, present, mean_loss = _split(flat, [*gradients, presence, loss.reshape(1)])
        for parameter, mean, somewhere in zip(parameters, means, present.tolist(), strict=True):
            parameter.grad = mean.to(parameter.dtype, copy=True) if somewhere else None
        return mean_loss.reshape(())

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> Tensor:
        """Scale the rotations' gradients so that their joint Euclidean norm is at most `max_norm`.

        Returns:
            The norm before, a scalar; the same bits on every rank.
        """
        gradients = [parameter.grad for _, parameter in self.bank.items() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm is not None and gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def divergence(self) -> Divergence:
        """Compare the ranks' rotations by digests of 8 bytes each; only if those differ, number by number."""
        rotations = dict(self.bank.items())
        if not rotations or self.communication.world_size == 1:
            return Divergence(0.0, ())
        digests = torch.stack([bit_digest(matrix) for matrix in rotations.values()])
        highest, inverted_lowest = self.communication.reduce_(torch.stack([digests, ~digests]), "max")
        differing = (highest != ~inverted_lowest).tolist()
        names = tuple(name for name, differs in zip(rotations, differing, strict=True) if differs)
        return Divergence(max((self._max_abs_diff(rotations[name]) for name in names), default=0.0), names)

    def _max_abs_diff(self, matrix: Tensor) -> float:
        highest = self.communication.reduce_(matrix.detach().clone(), "max")
        lowest = self.communication.reduce_(matrix.detach().clone(), "min")
        return float((highest - lowest).abs().max())


def bit_digest(matrix: Tensor) -> Tensor:
    """Return an int64 scalar that differs when any single number of a float32 or float64 matrix differs in any bit.

    Row and column sums of the bit patterns, weighted by odd numbers, modulo 2⁶⁴.
    """
    bits = matrix.detach().contiguous().view(torch.int32 if matrix.dtype == torch.float32 else torch.int64)
    weights = torch.arange(1, 2 * len(bits), 2, device=bits.device)
    return (bits.sum(1) * weights).sum() + 31 * (bits.sum(0) * weights).sum()


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]
