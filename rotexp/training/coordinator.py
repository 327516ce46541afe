"""Keep the rotations of all ranks alike: one start, one gradient, one norm, one clip, and the proof that it held."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotexp.config import OnDivergence
from rotexp.rotation.bank import RotationBank
from rotexp.sharding.communication import Communication
from rotexp.sharding.flat import divided
from rotexp.sharding.master import ZeRO2Master
from rotexp.sharding.shards import local_rows
from rotexp.sharding.state_dicts import collective_device

SMALL = 2**16
"""Numbers up to which a parameter that is no rotation shares the rotations' collective."""

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Divergence:
    """How far the ranks' rotations are apart.

    Attributes:
        max_abs_diff: the largest difference between two ranks.
        names: the rotations that differ.
        ranks: the ranks that differ from rank 0.
    """

    max_abs_diff: float = 0.0
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def line(self) -> str:
        """Return it as one line for people."""
        ranks = ", ".join(map(str, self.ranks))
        return f"{', '.join(self.names)} differ from rank 0's on rank {ranks} by up to {self.max_abs_diff:.1e}"


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of the gradients, scalars; `weights` is None where only rotations have gradients."""

    total: Tensor
    rotations: Tensor
    weights: Tensor | None


class Coordinator:
    """Acts for the bank of one model over the whole data-parallel world.

    Raises:
        ValueError: the model has no bank.
    """

    def __init__(self, model: nn.Module, communication: Communication, *, master: ZeRO2Master | None = None) -> None:
        banks = [(name, module) for name, module in model.named_modules() if isinstance(module, RotationBank)]
        if len(banks) != 1:
            raise ValueError(f"the model registers {len(banks)} rotation banks, not one; place rotations first")
        self.model = model
        self.prefix, self.bank = f"{banks[0][0]}.", banks[0][1]
        self.communication = communication
        self.master = master

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
    def consolidate(self, numbers: Tensor) -> Tensor:
        """Average gradients over all ranks, once an optimizer step: those of whole parameters, and the master's.

        Rotations and small parameters share one collective, whose buffer holds for each its gradient and whether this
        rank has one, and the numbers; one without a gradient on any rank keeps None. FSDP has averaged the gradients of
        sharded parameters already.

        Args:
            numbers: this rank's, (count,), float32.

        Returns:
            The numbers' means over all ranks.
        """
        if self.communication.world_size > 1:
            together, alone = self._whole_parameters()
            numbers = self._consolidate_together(together, numbers)
            for parameter in alone:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.communication.reduce_(gradient).div_(self.communication.world_size)
        if self.master is not None:
            self.master.reduce()
        return numbers

    def _consolidate_together(self, parameters: list[nn.Parameter], numbers: Tensor) -> Tensor:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        presence = torch.tensor([float(p.grad is not None) for p in parameters], device=numbers.device)
        flat = _flatten([*gradients, presence, numbers])
        self.communication.reduce_(flat).div_(self.communication.world_size)
        *means, present, mean_numbers = _split(flat, [*gradients, presence, numbers])
        for parameter, mean, somewhere in zip(parameters, means, present.tolist(), strict=True):
            parameter.grad = mean.to(parameter.dtype, copy=True) if somewhere else None
        return mean_numbers.to(numbers.dtype, copy=True)  # a view would keep the whole buffer

    def _whole_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return what is trained and neither FSDP nor the master reduces: the rotations and small ones, the others."""
        inside = set(self.master.layout.shapes) if self.master else set()
        together = [parameter for _, parameter in self.bank.items() if parameter.requires_grad]
        alone: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            skipped = name in inside or name.startswith(self.prefix) or isinstance(parameter, DTensor)
            if parameter.requires_grad and not skipped:
                (together if parameter.numel() <= SMALL else alone).append(parameter)
        return together, alone

    @torch.no_grad()
    def clip(self, max_norm: float | None, *, with_rotations: bool = True) -> Norms:
        """Scale all gradients by one coefficient, so that their joint Euclidean norm is at most `max_norm`.

        Args:
            with_rotations: whether the rotations' gradients are part of that norm; where the length of theirs changes
                no step they would only shorten the others.

        Returns:
            The norms before; the same bits on every rank.
        """
        gradients = self._gradients()
        rotation_part = _squared_norm([grad for name, grad in gradients.items() if name.startswith(self.prefix)])
        weights = [grad for name, grad in gradients.items() if not name.startswith(self.prefix)]
        weight_part = self._squared_weight_norm(weights) if weights or self.master else None
        total = (rotation_part if weight_part is None else rotation_part + weight_part).sqrt()
        norm = total if with_rotations else None if weight_part is None else weight_part.sqrt()
        if max_norm is not None and norm is not None:
            coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            coefficient = torch.where(total.isfinite(), coefficient, 1.0)  # lest one bad gradient spoil all
            for gradient in (*gradients.values(), *self._master_gradient()):
                local_rows(gradient).mul_(coefficient)
        return Norms(total, rotation_part.sqrt(), None if weight_part is None else weight_part.sqrt())

    @torch.no_grad()
    def nonfinite(self) -> str | None:
        """Return the first tensor, in the model's order, whose gradient is not finite on some rank (a collective)."""
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        faults = {name: _has_nonfinite(gradient) for name, gradient in self._gradients().items()}
        faults |= self._master_faults()
        mine = torch.tensor([float(faults.get(name, False)) for name in names])
        found = self.communication.reduce_(mine.to(collective_device(self.communication)), "max").tolist()
        return next((name for name, fault in zip(names, found, strict=True) if fault), None)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _master_gradient(self) -> list[Tensor]:
        return [] if self.master is None or self.master.shard.grad is None else [self.master.shard.grad]

    def _master_faults(self) -> dict[str, bool]:
        """Return which of the master's parameters have a gradient that is not finite in this rank's shard."""
        if self.master is None or self.master.shard.grad is None:
            return {}
        sizes = {name: shape.numel() for name, shape in self.master.layout.shapes.items()}
        cut = divided(self.master.pieces(self.master.shard.grad), sizes)
        return {name: any(map(_has_nonfinite, pieces.tensors)) for name, pieces in cut.items()}

    def _squared_weight_norm(self, gradients: list[Tensor]) -> Tensor:
        """Add up whole gradients once, and the shards of the others over all ranks (a collective if there are any)."""
        whole = _squared_norm([grad for grad in gradients if not isinstance(grad, DTensor)])
        if self.master is not None:
            whole = whole + self.master.squared_norm()
        shards = [grad for grad in gradients if isinstance(grad, DTensor)]
        if not shards:
            return whole
        mesh = shards[0].device_mesh
        local = _squared_norm([grad.to_local() for grad in shards])
        return whole + self.communication.reduce_(local) / (mesh.size() // mesh.size(mesh.ndim - 1))

    @torch.no_grad()
    def divergence(self) -> Divergence:
        """Compare the ranks' rotations by digests of 8 bytes each; only if those differ, number by number."""
        rotations = dict(self.bank.items())
        if not rotations or self.communication.world_size == 1:
            return Divergence()
        digests = torch.stack([bit_digest(matrix) for matrix in rotations.values()])
        highest, inverted_lowest = self.communication.reduce_(torch.stack([digests, ~digests]), "max")
        differing = (highest != ~inverted_lowest).tolist()
        names = tuple(name for name, differs in zip(rotations, differing, strict=True) if differs)
        if not names:
            return Divergence()
        return Divergence(
            max_abs_diff=max(self._max_abs_diff(rotations[name]) for name in names),
            names=names,
            ranks=self._odd_ranks(digests),
        )

    def settle(self, divergence: Divergence, policy: OnDivergence, *, step: int) -> None:
        """Do what the policy says about a divergence; every rank comes to the same decision.

        Raises:
            ArithmeticError: the policy is `raise`.
        """
        if not divergence.names:
            return
        text = f"step {step}: {divergence.line()}"
        if policy is OnDivergence["raise"]:
            raise ArithmeticError(f"{text}; metrics.on_divergence=log or rebroadcast goes on")
        LOGGER.warning(text)
        if policy is OnDivergence["rebroadcast"]:
            self.broadcast()

    def _max_abs_diff(self, matrix: Tensor) -> float:
        highest = self.communication.reduce_(matrix.detach().clone(), "max")
        lowest = self.communication.reduce_(matrix.detach().clone(), "min")
        return float((highest - lowest).abs().max())

    def _odd_ranks(self, digests: Tensor) -> tuple[int, ...]:
        """Return the ranks whose digests differ from rank 0's."""
        every = torch.zeros(self.communication.world_size, len(digests), dtype=digests.dtype, device=digests.device)
        every[self.communication.rank] = digests
        odd = (self.communication.reduce_(every) != every[0]).any(1)
        return tuple(odd.nonzero().flatten().tolist())


def bit_digest(matrix: Tensor) -> Tensor:
    """Return an int64 scalar that differs when any single number of (..., n, n) float32 or float64 differs in any bit.

    Row and column sums of the bit patterns, weighted by odd and by even numbers, modulo 2⁶⁴: a number's own weight is
    then odd, so no change of it is a multiple of 2⁶⁴.
    """
    bits = matrix.detach().contiguous().view(torch.int32 if matrix.dtype == torch.float32 else torch.int64)
    bits = bits.flatten(end_dim=-2)
    weights = torch.arange(1, 2 * len(bits), 2, device=bits.device)
    return (bits.sum(1) * weights).sum() + 62 * (bits.sum(0) * weights[: bits.shape[1]]).sum()


def _squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all numbers, a float32 scalar (float64 if a gradient is)."""
    squares = [torch.linalg.vector_norm(gradient, dtype=_accumulator(gradient)).square() for gradient in gradients]
    return torch.stack(squares).sum() if squares else torch.zeros(())


def _has_nonfinite(gradient: Tensor) -> bool:
    return not bool(torch.isfinite(local_rows(gradient)).all())


def _accumulator(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]
