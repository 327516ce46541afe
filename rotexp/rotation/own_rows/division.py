"""Divides the rotating and quantizing of sharded weights by the ranks, where that costs less than repeating it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rotexp.config.schema import Config
from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.own_rows.cost import ShardedShape, multiply_adds_per_byte
from rotexp.rotation.own_rows.rows import OwnRows
from rotexp.rotation.own_rows.weight import DividedWeight
from rotexp.sharding.communication import Communication
from rotexp.sharding.guard import param_groups
from rotexp.sharding.local_rows import reshard
from rotexp.sharding.options import ShardingConfig
from rotexp.sharding.strategies import strategy_of
from rotexp.training.options import Trainable


@dataclass(frozen=True)
class ShardedOver:
    """The ranks over which a weight is sharded.

    Attributes:
        ranks: that share it by rows.
        replicas: of each share.
        element_bytes: of one weight, as it is gathered.
        device_type: of the ranks.
    """

    ranks: int
    replicas: int
    element_bytes: int
    device_type: str


class Division:
    """The weights of one model that are divided, and the gradients that come from them.

    Attributes:
        weights: none where nothing is sharded, or where it would cost more.
    """

    def __init__(self, bank: RotationBank, weights: list[DividedWeight]) -> None:
        self.weights = weights
        self._bank = bank
        self._sums = {
            rotation.name: torch.zeros_like(rotation.matrix, requires_grad=False)
            for weight in weights
            for rotation in weight.learned
        }
        for weight in weights:
            weight.attach(self._sums)

    @torch.no_grad()
    def collect(self) -> None:
        """Add what came from own rows to the rotations' gradients; to be called after backward, once a step."""
        for name, total in self._sums.items():
            matrix = self._bank[name]
            matrix.grad = total.clone() if matrix.grad is None else matrix.grad.add_(total)
            total.zero_()
        for weight in self.weights:
            # Optimizers write lists of tensors, whose versions do not count that under a dispatch mode (torch 2.13).
            weight.own.forget_codes()

    def publish_clip_ratios(self) -> None:
        """Give the quantizers of whole weights the clip ratios in use (collectives), as a checkpoint needs them."""
        for weight in self.weights:
            weight.publish_clip_ratios()


@contextmanager
def dividing(
    model: RotatedModel, sharding: ShardingConfig, *, communication: Communication, frozen: bool = True
) -> Iterator[Division]:
    """Divide the work on those sharded, quantized weights for which it costs less, inside the block.

    Weights are quantized while the model rotates and quantizes, and elsewhere (a teacher's forward) what they are; so
    the mode may change only where they are gathered anew.

    Args:
        frozen: whether only rotations are trained; else nothing is divided.
    """
    reshard(model.network)
    groups = param_groups(model.network) if frozen and _can_divide(sharding) else []
    weights = [weight for group in groups for weight in _divided_weights(group, sharding, communication)]
    division = Division(model.bank, weights)
    _settle_dtypes(groups)
    try:
        yield division
    finally:
        reshard(model.network)
        for weight in weights:
            weight.detach()
        for module in model.rotated_modules:
            if isinstance(module, RotatedLinear):
                module.divided = None
        _settle_dtypes(groups)


def may_divide(config: Config, *, distills: bool) -> bool:
    """Return whether weights may be quantized before they are gathered: frozen, and not still those of the teacher.

    Under `numerics=exact` they are not: how rows are shared out would decide the last bits of what is made of them.

    Args:
        distills: whether the objective asks a teacher.
    """
    gathered_anew = strategy_of(config.sharding).reshards_after_forward or not distills
    return config.train.params is Trainable.rotations and gathered_anew and not config.numerics.exact


def will_divide(linear: RotatedLinear, sharding: ShardingConfig, where: ShardedOver) -> bool:
    """Return whether `dividing` divides a linear's weight, before it is sharded: its shape is enough.

    Args:
        where: the ranks over which the weight is going to be sharded.
    """
    shape = sharded_shape(linear, sharding, where) if _can_divide(sharding) else None
    return shape is not None and shape.is_cheaper_divided


def _can_divide(sharding: ShardingConfig) -> bool:
    """Return whether FSDP2 keeps shards where it can ask them what to gather."""
    return not sharding.cpu_offload and sharding.reshard_after_forward is None


def _divided_weights(group: Any, sharding: ShardingConfig, communication: Communication) -> Iterator[DividedWeight]:
    """Yield those weights of one of FSDP2's groups that it pays to divide."""
    for parameter in group.fsdp_params:
        linear = parameter._module_info.module
        if not isinstance(linear, RotatedLinear) or parameter._module_info.param_name != "weight":
            continue
        mesh = parameter.sharded_param.device_mesh
        ranks = mesh.size(-1)
        held = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
        where = ShardedOver(ranks, mesh.size() // ranks, held.itemsize, mesh.device_type)
        shape = sharded_shape(linear, sharding, where)
        if shape is not None and shape.is_cheaper_divided:
            own = _own_rows(linear, communication.over(mesh.get_group(mesh.ndim - 1)), within=not shape.exchanged)
            weight = DividedWeight(parameter, own, quantizer=linear.weight_quantizer, mode=linear.mode)
            linear.divided = weight
            yield weight


def _own_rows(linear: RotatedLinear, ranks: Communication, *, within: bool) -> OwnRows:
    quantizer = FakeQuantizer(linear.weight_quantizer.spec, linear.weight_quantizer.quantizer)
    return OwnRows(quantizer, linear.input_rotation, linear.output_rotation, linear.output_rows, ranks, within)


def sharded_shape(linear: RotatedLinear, sharding: ShardingConfig, where: ShardedOver) -> ShardedShape | None:
    """Return what decides about a weight, or None where its rows are no fair share, or nothing is quantized."""
    shape, spec, after = linear.shape(), linear.weight_quantizer.spec, linear.output_rotation
    blocks = after is None or (linear.output_rows is None and (shape.outputs // where.ranks) % shape.output_order == 0)
    fair = shape.outputs % where.ranks == 0 and (blocks or shape.inputs % where.ranks == 0)
    if not spec.enabled or where.ranks == 1 or not fair:
        return None
    return ShardedShape(
        shape,
        ranks=where.ranks,
        replicas=where.replicas,
        gathers=2 if strategy_of(sharding).reshards_after_forward else 1,
        element_bytes=where.element_bytes,
        scales=spec.num_groups(shape.inputs),
        exchanged=not blocks,
        learned=any(r is not None and r.matrix.requires_grad for r in (linear.input_rotation, after)),
        multiply_adds_per_byte=multiply_adds_per_byte(where.device_type),
    )


def _settle_dtypes(groups: list[Any]) -> None:
    """Let FSDP2 find out in which dtype it reduces the gradients of weights that have them now."""
    for group in groups:
        group._init_mp_dtypes()
