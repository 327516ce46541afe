"""Gradient checkpointing really recomputes every layer once in backward, and changes no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig

from rotexp.config.schema import Config
from rotexp.models.arch import OPT
from rotexp.models.load import checkpoint_layers, open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.building import build_for_run
from rotexp.rotation.merge import prepare
from rotexp.training.objectives import CrossEntropy
from rotexp.training.options import TrainConfig


def gradients(weights: QuantSpec, *, checkpointed: bool) -> tuple[list[torch.Tensor], int]:
    """Return the rotations' gradients, and how often the first layer's MLP ran."""
    checkpoint = open_checkpoint(ModelConfig(name="random", source=ModelSource.random, size="nano"), seed=0)
    quant = QuantConfig("some", weights=weights, activations=QuantSpec(4, symmetric=False))
    config = Config(quant=quant, train=TrainConfig(gradient_checkpointing=checkpointed))
    model = build_for_run(checkpoint, config, dtype=torch.float32)
    materialize(model.network, checkpoint, device=torch.device("cpu"), added=model.added)
    prepare(model)
    runs: list[nn.Module] = []
    model.network.get_submodule("model.layers.0.mlp").register_forward_pre_hook(lambda module, _: runs.append(module))
    with model.mode.set(rotate=True, quantize=True):
        CrossEntropy()(model, torch.arange(16)[None]).backward()
    return [matrix.grad for matrix in model.bank.parameters() if matrix.grad is not None], len(runs)


@pytest.mark.parametrize("weights", [QuantSpec(4), QuantSpec()], ids=["w4a4", "w16a4"])
def test_layers_are_recomputed_and_gradients_stay(weights: QuantSpec) -> None:
    plain, once = gradients(weights, checkpointed=False)
    recomputed, twice = gradients(weights, checkpointed=True)
    assert (once, twice) == (1, 2)
    assert len(plain) == 3
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)


def test_layers_that_drop_out_by_themselves_do_not() -> None:
    shape = {"hidden_size": 48, "word_embed_proj_dim": 48, "ffn_dim": 80, "vocab_size": 61}
    config = OPTConfig(**shape, num_hidden_layers=2, num_attention_heads=4, dropout=0.5)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = model(torch.arange(8)[None]).logits
    checkpoint_layers(model, OPT)
    torch.testing.assert_close(model(torch.arange(8)[None], use_cache=False).logits, expected)
