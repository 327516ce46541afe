"""A tied model of transformers that is placed from Python stays the model it was, also where it is tied again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, WANTED, from_config, logits, make_source, make_token_ids, wanted
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotexp.models.arch import find_spec, head_name, is_tied
from rotexp.quant.options import QuantConfig
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place

TIED = ("llama", "gemma", "cohere", "opt", "gpt_neox", "gptj", "stablelm", "gemma2 with binding caps")


def tied_and_placed(name: str, rotation: RotationConfig) -> tuple[Any, RotatedModel]:
    """Return a tied Hugging Face model, and a copy with rotations placed."""
    source = make_source(name, tie_word_embeddings=True)
    assert is_tied(source)
    network = copy.deepcopy(source)
    return source, place(network, find_spec(network), rotation, QuantConfig(), seed=0)


@pytest.mark.parametrize("placement", WANTED)
@pytest.mark.parametrize("name", TIED)
def test_a_tied_model_computes_the_same_though_transformers_ties_it_again(name: str, placement: str) -> None:
    rotation = wanted(name, placement)
    source, model = tied_and_placed(name, rotation)
    token_ids = make_token_ids()
    original = source(token_ids, use_cache=False).logits
    parted = "R1" in model.bank
    assert (model.untied == f"{head_name(source)}.weight") is parted
    network: Any = model.network

    def check() -> None:
        network.tie_weights()
        assert is_tied(network) is not parted
        assert relative_error(original, logits(model, token_ids)) <= 1e-5

    prepare(model)
    check()
    merge(model)
    check()


def test_a_merged_model_that_was_tied_is_saved_and_read_by_transformers(tmp_path: Path) -> None:
    source, model = tied_and_placed("llama", RotationConfig(r1=True, r2=True))
    prepare(model)
    merge(model)
    network: Any = model.network
    plain = from_config(FAMILIES["llama"].config(tie_word_embeddings=False))
    plain.load_state_dict(network.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    network.config.save_pretrained(tmp_path / "plain")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    token_ids: Tensor = make_token_ids()
    with torch.no_grad():
        assert relative_error(source(token_ids).logits, read(token_ids).logits) <= 1e-5


@torch.no_grad()
def assert_placed_exactly(source: Any, rotation: RotationConfig) -> None:
    """Place in the model itself: a copy of it would share no memory."""
    token_ids = make_token_ids()
    original = source(token_ids).logits
    model = place(source, find_spec(source), rotation, QuantConfig(), seed=0)
    prepare(model)
    assert relative_error(original, logits(model, token_ids)) <= 1e-5


def share_a_weight(model: Any) -> None:
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


def share_values(model: Any) -> None:
    first, second = model.model.layers
    second.self_attn.v_proj.weight = torch.nn.Parameter(first.self_attn.v_proj.weight.data)


def share_rows(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    rows = torch.randn(2 * len(mlp.up_proj.weight) - 1, mlp.up_proj.in_features)
    mlp.gate_proj.weight = torch.nn.Parameter(rows[: len(mlp.up_proj.weight)])
    mlp.up_proj.weight = torch.nn.Parameter(rows[len(mlp.up_proj.weight) - 1 :])


def share_a_gain(model: Any) -> None:
    first, second = model.model.layers
    second.input_layernorm.weight = first.post_attention_layernorm.weight


def share_a_norm(model: Any) -> None:
    first, second = model.model.layers
    second.input_layernorm = first.input_layernorm


SHARED: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "a parameter of two layers": (share_a_weight, "0.mlp.up_proj.weight", "1.mlp.up_proj.weight"),
    "the memory of values": (share_values, "0.self_attn.v_proj.weight", "1.self_attn.v_proj.weight"),
    "a row of gate and up": (share_rows, "0.mlp.gate_proj.weight", "0.mlp.up_proj.weight"),
    "a gain": (share_a_gain, "0.post_attention_layernorm.weight", "1.input_layernorm.weight"),
    "a norm": (share_a_norm, "0.input_layernorm.weight", "1.input_layernorm.weight"),
}


@pytest.mark.parametrize("kind", SHARED)
def test_weights_that_modules_share_are_refused_by_both_names_where_a_rotation_goes_into_them(kind: str) -> None:
    share, one, other = SHARED[kind]
    source = make_source("llama")
    share(source)
    layers = r"model_type=llama: model\.layers\."
    for rotation in (RotationConfig(r1=True, r2=False), RotationConfig(r1=False, r2=True)):
        with pytest.raises(
            ValueError, match=rf"^{layers}{one} and model\.layers\.{other} share their memory"
        ) as refused:
            place(source, find_spec(source), rotation, QuantConfig(), seed=0)
        assert "\n" not in str(refused.value)
    assert_placed_exactly(source, RotationConfig(r1=False, r2=False, r3=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_head_in_the_embeddings_memory_is_untied(device: str) -> None:
    source = make_source("llama").to(device)
    weight = source.get_input_embeddings().weight.data
    source.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert is_tied(source)
    if device == "cpu":
        assert_placed_exactly(source, RotationConfig(r1=True))
    else:
        place(source, find_spec(source), RotationConfig(r1=True), QuantConfig(), seed=0)
    assert not is_tied(source)


def test_parts_of_one_storage_that_do_not_overlap_are_weights_of_their_own() -> None:
    source = make_source("llama")
    mlp = source.model.layers[0].mlp
    fused = torch.randn(2, *mlp.up_proj.weight.shape)
    mlp.gate_proj.weight, mlp.up_proj.weight = (torch.nn.Parameter(part, requires_grad=False) for part in fused)
    assert_placed_exactly(source, RotationConfig(r1=True, r2=True, r4=True))
