"""Bake the rotations into the weights, so that the model no longer needs its bank."""

from __future__ import annotations

import torch

from rotexp.rotation.linear import RotatedEmbedding, RotatedLinear
from rotexp.rotation.placement import RotatedModel
from rotexp.sharding.shards import gathered, reshard, write_rows


@torch.no_grad()
def merge(model: RotatedModel) -> None:
    """Replace every weight by its rotated one and empty the bank; online transforms stay online.

    Under sharding one unit at a time is whole.
    """
    reshard(model.network)
    for unit in model.units:
        modules = [module for module in unit.modules() if isinstance(module, (RotatedLinear, RotatedEmbedding))]
        with gathered(unit):
            merged = [module.merged() for module in modules]
        for module, tensors in zip(modules, merged, strict=True):
            for name, values in tensors.items():
                write_rows(module.get_parameter(name), values)
            module.release()
    model.bank.prune(name for name, _ in tuple(model.bank.items()))


@torch.no_grad()
def bake_online(model: RotatedModel) -> None:
    """Put the counterparts of the online transforms into the weights, once."""
    reshard(model.network)
    for module in model.rotated_modules:
        if isinstance(module, RotatedLinear):
            module.bake()
