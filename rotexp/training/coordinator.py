"""Keep what ranks hold alike alike: one start, one gradient, one norm, one clip, and the proof that it held."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotexp.metrics.options import OnDivergence
from rotexp.rotation.bank import RotationBank
from rotexp.sharding.communication import Communication
from rotexp.sharding.ema import ShardedEMA
from rotexp.sharding.flat import split_by_name
from rotexp.sharding.local_rows import local_rows, reshard
from rotexp.sharding.master import ZeRO2Master
from rotexp.sharding.replicas import Divergence, compare, copy_first
from rotexp.sharding.state_dicts import collective_device
from rotexp.training.optimizers import Optimizers

SMALL = 2**16
"""Numbers up to which a parameter that is no rotation shares the rotations' collective."""

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of the gradients, scalars; `weights` is None where only rotations have gradients."""

    total: Tensor
    rotations: Tensor
    weights: Tensor | None


class Coordinator:
    """Acts for the rotations of one model over the whole data-parallel world.

    These are the bank of a placed model, or in a model of your own any module whose parameters every rank holds whole,
    such as an `nn.ParameterDict`, and that FSDP ignores (`fully_shard(..., ignored_params=set(it.parameters()))`).

    Raises:
        ValueError: the model has no bank, or what is replicated is no module of it.
    """

    def __init__(
        self,
        model: nn.Module,
        communication: Communication | None = None,
        *,
        replicated: nn.Module | None = None,
        master: ZeRO2Master | None = None,
        optimizers: Optimizers | None = None,
        ema: ShardedEMA | None = None,
    ) -> None:
        """Act for a model of which is trained what requires a gradient now (a division lends some to frozen weights).

        Args:
            communication: over the ranks (None: all of the process group).
            replicated: the module of the model that holds the rotations (None: its `RotationBank`).
            master, optimizers, ema: what training keeps beside the model, if anything.
        """
        name, self.bank = _find_rotations(model, replicated)
        self.model = model
        self.prefix = f"{name}."
        self.communication = Communication.of_world(_device(self.bank)) if communication is None else communication
        self.master = master
        self._optimizers = optimizers
        self._ema = ema
        bank = set(self.bank.parameters())
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter not in bank]
        self._weights = [name for name, _ in named]
        self._trained = [name for name, parameter in named if parameter.requires_grad]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every rank the rotations of rank 0, bit for bit, by one collective."""
        parameters = [parameter for _, parameter in self.bank.named_parameters()]
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
        together = [parameter for _, parameter in self.bank.named_parameters() if parameter.requires_grad]
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
        parts = split_by_name(self.master.pieces(self.master.shard.grad), sizes)
        return {name: any(map(_has_nonfinite, part.tensors)) for name, part in parts.items()}

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

    def divergence(self, *, frozen: bool = False) -> Divergence:
        """Compare the replicas of all rotations and trained weights, those of shards too (one collective, as a rule).

        The clip ratios that quantizers search are not compared: they follow from these.

        Args:
            frozen: compare frozen weights as well, which takes reading all of them.
        """
        return compare(self._held(self._weights if frozen else self._trained), communication=self.communication)

    def settle(self, divergence: Divergence, policy: OnDivergence, *, step: int) -> bool:
        """Do what the policy says about a divergence; every rank comes to the same decision.

        Returns:
            Whether anything was overwritten, after which clip ratios are to be searched anew.

        Raises:
            ArithmeticError: the policy is `raise`.
        """
        if not divergence.names:
            return False
        text = f"step {step}: {divergence.line()}"
        if policy is OnDivergence["raise"]:
            raise ArithmeticError(f"{text}; metrics.on_divergence=log or rebroadcast goes on")
        LOGGER.warning(text)
        if policy is OnDivergence["rebroadcast"]:
            self._rebroadcast(divergence.names)
            return True
        return False

    def _rebroadcast(self, names: Sequence[str]) -> None:
        """Give every replica the first one's numbers and what its optimizer and average have of them.

        The master's weights are published anew instead, since it holds each of them once.
        """
        published = set(self.master.layout.shapes if self.master else ()) & set(names)
        copied = [name for name in names if name not in published]
        held = self._held(self._weights)
        values = {name: held[name] for name in copied} | self._kept_beside(copied)
        copy_first(values, communication=self.communication)
        if self.master is not None and published:
            self.master.publish()

    def _held(self, weights: Sequence[str]) -> dict[str, Tensor]:
        """Return the rotations and the weights named, as this rank holds them."""
        reshard(self.model)
        named = dict(self.model.named_parameters())
        held = {name: named[name].detach() for name in weights}
        return {name: matrix.detach() for name, matrix in self.bank.named_parameters()} | held

    def _kept_beside(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return moments and averages of what is named."""
        moments = self._optimizers.tensors() if self._optimizers is not None else {}
        averages = self._ema.state() if self._ema is not None else {}
        rotations = {name: f"{self.prefix}{name}" for name, _ in self.bank.named_parameters()}
        averaged = {f"average/{name}": averages.get(rotations.get(name, name)) for name in names}
        found = {key: moment for key, moment in moments.items() if key.rpartition("/")[0] in names}
        return found | {key: average for key, average in averaged.items() if isinstance(average, Tensor)}


def _find_rotations(model: nn.Module, replicated: nn.Module | None) -> tuple[str, nn.Module]:
    """Return the module whose parameters every rank holds whole, with its name in the model."""
    named = dict(model.named_modules())
    if replicated is not None:
        name = next((name for name, module in named.items() if module is replicated), "")
        if not name:
            raise ValueError("replicated: is no module of the model; register what holds the matrices as one of it")
        return name, replicated
    banks = [(name, module) for name, module in named.items() if isinstance(module, RotationBank)]
    if len(banks) != 1:
        raise ValueError(
            f"the model registers {len(banks)} rotation banks, not one; place rotations first, or name the module that "
            f"holds yours by replicated=…"
        )
    return banks[0]


def _device(module: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in module.parameters()), None)


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
