"""Merging bakes the rotations into the weights: the same model, an empty bank, the tensors of a plain checkpoint."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.invariance import check_merged, relative_error, trace
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit

Factory = Callable[..., Any]
W4A4 = QuantConfig(weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False))
SHAPE = {"attention_bias": True, "mlp_bias": True}
ALL = RotationConfig(r1=True, r2=True, r4=True)


def logits(model: RotatedModel, token_ids: Tensor, *, quantize: bool = False) -> Tensor:
    with torch.no_grad(), model.mode.set(rotate=True, quantize=quantize):
        return model.logits(token_ids)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("init", [RotationInit.hadamard, RotationInit.random])
def test_merged_equals_unmerged_and_the_source(
    llama: Factory, rotated: Factory, token_ids: Tensor, init: RotationInit, tied: bool
) -> None:
    source = llama(tie_word_embeddings=tied, **SHAPE)
    model = rotated(source, RotationConfig(r4=True, init=init), W4A4)
    before = logits(model, token_ids)
    merge(model)
    assert relative_error(before, logits(model, token_ids)) <= 1e-5
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= 1e-5
    with model.mode.set(rotate=False, quantize=False):
        assert relative_error(source(token_ids).logits, model.logits(token_ids)) <= 1e-5


def test_quantized_layers_give_the_same_bits(llama: Factory, rotated: Factory) -> None:
    model = rotated(llama(**SHAPE), ALL, W4A4)
    layers = [layer for layer in model.rotated_modules if isinstance(layer, RotatedLinear)]
    quantized = [layer for layer in layers if layer.weight_quantizer.spec.enabled]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 7, layer.weight.shape[1], generator=generator) for layer in quantized]
    assert len(quantized) == 14
    with torch.no_grad(), model.mode.set(rotate=True, quantize=True):
        before = [layer(x) for layer, x in zip(quantized, inputs, strict=True)]
        merge(model)
        for layer, x, expected in zip(quantized, inputs, before, strict=True):
            assert torch.equal(layer(x), expected)


def test_a_quantized_model_without_r1_gives_the_same_bits(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    model = rotated(llama(**SHAPE), RotationConfig(r1=False, r2=True, r4=True), W4A4)
    before = logits(model, token_ids, quantize=True)
    merge(model)
    assert torch.equal(logits(model, token_ids, quantize=True), before)
    assert not torch.equal(logits(model, token_ids, quantize=False), before)


def test_a_model_with_quantized_weights_and_r1_is_the_same_up_to_rounding(
    llama: Factory, rotated: Factory, token_ids: Tensor
) -> None:
    model = rotated(llama(**SHAPE), ALL, QuantConfig(weights=QuantSpec(4, group_size=16)))
    before = logits(model, token_ids, quantize=True)
    merge(model)
    assert relative_error(before, logits(model, token_ids, quantize=True)) <= 1e-5


def test_the_bank_is_empty_and_every_tensor_is_the_sources_by_name_and_shape(llama: Factory, rotated: Factory) -> None:
    source = llama(**SHAPE)
    model = rotated(source, ALL, W4A4)
    merge(model)
    assert len(model.bank) == 0
    assert all(getattr(module, "input_rotation", None) is None for module in model.rotated_modules)
    assert {name: tensor.shape for name, tensor in model.network.state_dict().items()} == {
        name: tensor.shape for name, tensor in source.state_dict().items()
    }


def test_merged_weights_run_in_a_plain_model(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    source = llama(**SHAPE)
    model = rotated(source, RotationConfig(r1=True, r2=True, r4=False))
    merge(model)
    plain: Any = LlamaForCausalLM(source.config).eval().requires_grad_(False)
    plain.load_state_dict(model.network.state_dict())
    assert not torch.equal(plain.lm_head.weight, source.lm_head.weight)
    assert relative_error(source(token_ids).logits, plain(token_ids).logits) <= 1e-5


def test_merged_weights_are_the_dense_products(llama: Factory, rotated: Factory) -> None:
    source = llama(**SHAPE)
    model = rotated(source, ALL)
    r1 = model.bank["R1"].detach().double()
    r2 = model.bank["R2_0"].detach().double()
    merge(model)
    layer, merged = source.model.layers[0], model.network.model.layers[0]
    gain = layer.input_layernorm.weight.double()
    hadamard = merged.mlp.down_proj.online.matrix(torch.float64)
    attention, mlp = layer.self_attn, layer.mlp
    pairs = {
        "values": (
            merged.self_attn.v_proj.weight,
            torch.block_diag(r2, r2).T @ (attention.v_proj.weight.double() * gain) @ r1,
        ),
        "values' bias": (merged.self_attn.v_proj.bias, torch.block_diag(r2, r2).T @ attention.v_proj.bias.double()),
        "queries": (merged.self_attn.q_proj.weight, (attention.q_proj.weight.double() * gain) @ r1),
        "queries' bias": (merged.self_attn.q_proj.bias, attention.q_proj.bias.double()),
        "output": (
            merged.self_attn.o_proj.weight,
            r1.T @ attention.o_proj.weight.double() @ torch.block_diag(r2, r2, r2, r2),
        ),
        "down": (merged.mlp.down_proj.weight, r1.T @ mlp.down_proj.weight.double() @ hadamard),
        "down's bias": (merged.mlp.down_proj.bias, r1.T @ mlp.down_proj.bias.double()),
        "embedding": (model.network.model.embed_tokens.weight, source.model.embed_tokens.weight.double() @ r1),
        "head": (model.network.lm_head.weight, (source.lm_head.weight * source.model.norm.weight).double() @ r1),
    }
    for name, (actual, expected) in pairs.items():
        torch.testing.assert_close(
            actual.double(), expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_online_hadamard_stays_online(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    source = llama(**SHAPE)
    model = rotated(source, ALL)
    merge(model)
    assert model.online == {"R4": 80}
    for layer in model.network.model.layers:
        assert layer.mlp.down_proj.online.order == 80
    model.network.model.layers[0].mlp.down_proj.online = None
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) > 1e-2


def test_cached_clip_ratios_are_forgotten_on_request(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    model = rotated(llama(**SHAPE), quant=QuantConfig(weights=QuantSpec(4, clip_search=True)))
    stale = logits(model, token_ids, quantize=True)
    for parameter in model.network.model.layers[0].mlp.parameters():
        parameter[::2] = parameter.flip(-1)[::2]
    model.refresh_quantizers()
    assert all(
        layer.weight_quantizer._clip_ratios is None
        for layer in model.rotated_modules
        if isinstance(layer, RotatedLinear)
    )
    assert not torch.equal(logits(model, token_ids, quantize=True), stale)


def test_a_merge_that_changes_the_model_is_found(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    model = rotated(llama(), ready=False)
    original = trace(model, token_ids, rotate=False)
    prepare(model)
    merge(model)
    assert check_merged(original, model, dtype=torch.float32) <= 1e-5
    model.network.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ArithmeticError, match="merging changed the logits by"):
        check_merged(original, model, dtype=torch.float32)


@pytest.mark.parametrize("keep", [False, True])
def test_codes_of_quantized_weights_are_kept_only_if_asked_for(
    llama: Factory, rotated: Factory, token_ids: Tensor, keep: bool
) -> None:
    model = rotated(llama(), quant=QuantConfig(weights=QuantSpec(4, symmetric=True)))
    model.keep_codes(keep)
    saved: list[torch.dtype] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    with model.mode.set(rotate=True, quantize=True), torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        model.logits(token_ids)
    assert (torch.int8 in saved) is keep
