"""Prepare a placed model for its rotations, and bake them into the weights so that it no longer needs its bank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rotexp.rotation.model import SCALES, Consumer, RotatedModel
from rotexp.rotation.norms import fold_norms, trains_norms
from rotexp.sharding.local_rows import gathered, reshard, write_rows


@torch.no_grad()
def prepare(model: RotatedModel) -> None:
    """Fold norms if the residual stream is rotated, and put the counterparts of the online transforms into the weights.

    Norms that are trained require gradients by now: they act on the rotated stream, which then has to be rotated.

    Raises:
        ValueError: a norm cannot be folded.
    """
    reshard(model.network)
    if model.residual is not None:
        fold_norms(model.network, model.spec)
        if trains_norms(model.network, model.spec):
            model.mode.within -= {model.residual.name}
    for module in model.rotated_modules:
        module.bake()
    model.prepared, model.mode.refusal = True, None


@torch.no_grad()
def merge(model: RotatedModel) -> None:
    """Replace every weight by its rotated one and empty the bank; online transforms stay online.

    Quantizers keep learned scales, which the network no longer registers. Under sharding one unit at a time is whole.
    """
    reshard(model.network)
    if model.residual is not None:
        model.merged_residual = model.residual.matrix.detach().clone()
    for unit in model.units:
        consumers = model.consumers(unit)
        with gathered(unit):
            merged = [_changed(module, consumer) for module, consumer in consumers]
        for (module, consumer), tensors in zip(consumers, merged, strict=True):
            for name, values in tensors.items():
                write_rows(module.get_parameter(name), values)
            consumer.release()
    model.bank.prune(name for name, _ in tuple(model.bank.items()))
    if model.scales is not None:
        delattr(model.network, SCALES)


def _changed(module: nn.Module, consumer: Consumer) -> dict[str, Tensor]:
    """Return what differs once merged; the rest is a gathered parameter itself, which loses its memory afterwards."""
    return {name: values for name, values in consumer.merged().items() if values is not module.get_parameter(name)}
