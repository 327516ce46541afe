"""Gradient checkpointing really recomputes every layer once in backward, and changes no gradient."""

from __future__ import annotations

import torch
from torch import nn

from rotexp.config import ModelConfig, ModelSource, QuantConfig, RotationConfig
from rotexp.models.arch import find_spec
from rotexp.models.load import build_model, checkpoint_layers, open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.placement import place
from rotexp.training.objectives import CrossEntropy


def gradients(*, checkpointed: bool) -> tuple[list[torch.Tensor], int]:
    """Return the rotations' gradients, and how often the first layer's MLP ran."""
    checkpoint = open_checkpoint(ModelConfig(name="random", source=ModelSource.random, size="nano"), seed=0)
    network = build_model(checkpoint, dtype=torch.float32)
    if checkpointed:
        checkpoint_layers(network, find_spec(network))
    quant = QuantConfig("w4a4", weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False))
    model = place(network, find_spec(network), RotationConfig(name="learned"), quant, seed=0)
    materialize(network, checkpoint, device=torch.device("cpu"), added=model.added)
    runs: list[nn.Module] = []
    network.get_submodule("model.layers.0.mlp").register_forward_pre_hook(lambda module, _: runs.append(module))
    with model.mode.set(rotate=True, quantize=True):
        CrossEntropy()(model, torch.arange(16)[None]).backward()
    return [matrix.grad for matrix in model.bank.parameters() if matrix.grad is not None], len(runs)


def test_layers_are_recomputed_and_gradients_stay() -> None:
    plain, once = gradients(checkpointed=False)
    recomputed, twice = gradients(checkpointed=True)
    assert (once, twice) == (1, 2)
    assert len(plain) == 3
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)
