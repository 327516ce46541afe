"""A model's structure is built without memory, its buffers with the values that the model computes."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, make_source
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig

from rotexp.errors.library import refused
from rotexp.models.structure import build_network


def test_experts_larger_than_any_memory_are_built_since_they_are_never_allocated() -> None:
    config = MixtralConfig(
        hidden_size=2**14, intermediate_size=2**20, num_local_experts=2**12, num_hidden_layers=1, vocab_size=61
    )
    network = build_network(config, dtype=torch.float32)
    experts = network.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert (experts.is_meta, experts.shape) == (True, (2**12, 2**21, 2**14))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(experts.shape)


@pytest.mark.parametrize("name", FAMILIES)
def test_buffers_are_those_of_a_model_that_is_built_with_memory(name: str) -> None:
    source = make_source(name)
    network = build_network(source.config, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in network.parameters())
    expected = dict(source.named_buffers())
    buffers = dict(network.named_buffers())
    assert buffers.keys() == expected.keys()
    for key, buffer in buffers.items():
        assert torch.equal(buffer, expected[key]), key


def test_a_buffer_made_without_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaForCausalLM.__init__

    def with_buffer(model: nn.Module, *arguments: object) -> None:
        original(model, *arguments)
        model.register_buffer("table", torch.empty(2))

    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_buffer)
    with pytest.raises(ValueError, match=r"^buffers are made without values: table$"):
        build_network(make_source("llama").config, dtype=torch.float32)


def test_a_lack_of_memory_is_nobodys_wrong_file() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"), refused(str):
        torch.empty(2**50)
