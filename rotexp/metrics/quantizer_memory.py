"""What the quantizers of weights keep on one rank while it trains: clip ratios, and what dividing them adds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.own_rows.division import ShardedOver, may_divide, will_divide
from rotexp.sharding.applying import precision_policy, split_parameters
from rotexp.sharding.strategies import mesh_sizes

FP32_BYTES = 4
GRID = 3
"""Scale, lowest and highest code of each group."""


@dataclass(frozen=True)
class QuantizerBytes:
    """Bytes that quantizers of weights keep; the names are those of `rotexp.metrics.static_memory.StaticBytes`."""

    clip_ratios: int = 0
    divided_scales: int = 0
    divided_sums: int = 0
    divided_codes: int = 0


def quantizer_bytes(
    model: RotatedModel, config: Config, *, world_size: int, ranks_per_node: int | None, device_type: str
) -> QuantizerBytes:
    """Count for one rank; shapes are enough.

    A divided weight of r rows of w numbers in g groups, over N ranks, has r g / N clip ratios and codes of r w / N
    numbers with three float32 numbers for each group; its r g scales stay with every rank. Each learned rotation of one
    has a sum of its own size.
    """
    replicas, ranks = mesh_sizes(config.sharding, world_size=world_size, ranks_per_node=ranks_per_node)
    divided = list(_divided(model, config, replicas=replicas, ranks=ranks, device_type=device_type))
    own = {linear.weight_quantizer: ranks for linear in divided}
    rotations = {
        rotation.name: rotation.matrix.numel() * rotation.matrix.element_size()
        for linear in divided
        for rotation in (linear.input_rotation, linear.output_rotation)
        if rotation is not None and rotation.matrix.requires_grad
    }
    return QuantizerBytes(
        clip_ratios=FP32_BYTES * sum(groups // own.get(quantizer, 1) for quantizer, groups in _searching(model)),
        divided_scales=FP32_BYTES * sum(_groups(linear) for linear in divided),
        divided_sums=sum(rotations.values()),
        divided_codes=sum(_codes(linear) // ranks for linear in divided),
    )


def _divided(
    model: RotatedModel, config: Config, *, replicas: int, ranks: int, device_type: str
) -> Iterator[RotatedLinear]:
    if not may_divide(config, distills=build(config.objective).distills):
        return
    split = split_parameters(model.network, model.units, config.sharding)
    for linear in model.rotated_modules:
        if isinstance(linear, RotatedLinear) and linear.weight in split:
            gathered = precision_policy(config.sharding).param_dtype or linear.weight.dtype
            where = ShardedOver(ranks, replicas, gathered.itemsize, device_type)
            if will_divide(linear, config.sharding, where):
                yield linear


def _searching(model: RotatedModel) -> Iterator[tuple[FakeQuantizer, int]]:
    """Yield the quantizers of whole weights that search clip ratios, and of how many groups, over all rows."""
    for module in model.rotated_modules:
        for name, quantizer in module.weight_quantizers.items():
            *outputs, width = module.get_parameter(name).shape
            if quantizer.spec.enabled and quantizer.spec.clip_search and quantizer.learned is None:
                yield quantizer, math.prod(outputs) * quantizer.spec.num_groups(width)


def _codes(linear: RotatedLinear) -> int:
    """Return the bytes of a whole weight's codes and of their grids."""
    return linear.weight.numel() * linear.weight_quantizer.code_dtype.itemsize + GRID * FP32_BYTES * _groups(linear)


def _groups(linear: RotatedLinear) -> int:
    """Return how many groups a whole weight is quantized in."""
    outputs, inputs = linear.weight.shape
    return outputs * linear.weight_quantizer.spec.num_groups(inputs)
