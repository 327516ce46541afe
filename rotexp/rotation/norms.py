"""Fold norm gains into the linears that read them, so that what lies between two norms commutes with a rotation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rotexp.models.arch import ArchSpec
from rotexp.sharding.shards import local_rows, reshard, whole


@torch.no_grad()
def fold_norms(model: nn.Module, spec: ArchSpec) -> None:
    """Multiply every reader's weight by its norm's gain, column by column, and set the gain to one.

    Works on any shard of rows; gains are gathered. The product is formed in float32 (float64 for a float64 model) and
    stored in the weight's dtype.
    """
    reshard(model)
    for layer in decoder_layers(model, spec):
        for norm, readers in spec.norms.items():
            _fold(layer.get_submodule(norm), [layer.get_submodule(reader) for reader in readers])
    _fold(model.get_submodule(spec.final_norm), [model.get_submodule(spec.head)])


def _fold(norm: nn.Module, readers: list[nn.Module]) -> None:
    gain = norm.weight
    assert isinstance(gain, Tensor)
    factors = whole(gain)
    factors = factors.to(torch.promote_types(factors.dtype, torch.float32))
    for reader in readers:
        assert isinstance(reader.weight, Tensor)
        rows = local_rows(reader.weight)
        rows.copy_(rows.to(factors.dtype) * factors)
    local_rows(gain).fill_(1.0)


def decoder_layers(model: nn.Module, spec: ArchSpec) -> list[nn.Module]:
    """Return the decoder layers in order."""
    layers = model.get_submodule(spec.layers)
    assert isinstance(layers, nn.ModuleList)
    return list(layers)
