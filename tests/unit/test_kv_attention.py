"""Attention over a quantized cache is attention over fake-quantized keys, after RoPE, and values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.attention import PREFIX, Cache
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.options import RotationConfig

Factory = Callable[..., Any]
HEADS, HEAD_DIM = 4, 12
KV = QuantSpec(3, symmetric=False, group_size=6)
ONLY_KV = QuantConfig(kv=KV)
NO_ROTATION = RotationConfig(r1=False, r2=False)


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> np.ndarray:
    """Causal attention in float64, head by head: (batch, tokens, heads * head_dim)."""
    q, k, v = (states.double().numpy() for states in (query, key, value))
    batch, heads, tokens, width = q.shape
    result = np.zeros((batch, tokens, heads * width))
    for b in range(batch):
        for h in range(heads):
            shared = h * k.shape[1] // heads
            for t in range(tokens):
                scores = k[b, shared, : t + 1] @ q[b, h, t] / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                result[b, t, h * width : (h + 1) * width] = weights / weights.sum() @ v[b, shared, : t + 1]
    return result


def run_attention(model: Any, hidden: Tensor, *, rotate: bool, quantize: bool) -> tuple[Tensor, Tensor]:
    """Return what the first layer's output projection reads for `hidden`, and that projection's output."""
    attention = model.network.model.layers[0].self_attn
    read: list[Tensor] = []
    hook = attention.o_proj.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    position_embeddings = model.network.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    with torch.no_grad(), model.mode.set(rotate=rotate, quantize=quantize):
        output, _ = attention(hidden, position_embeddings=position_embeddings, attention_mask=None)
    hook.remove()
    return read[0], output


def states(model: Any, hidden: Tensor, *, rotate: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys after RoPE, and values, of the first layer."""
    attention = model.network.model.layers[0].self_attn
    with torch.no_grad(), model.mode.set(rotate=rotate, quantize=False):
        query, key, value = (
            attention.get_submodule(name)(hidden).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
    cosine, sine = model.network.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    return *apply_rotary_pos_emb(query, key, cosine, sine), value


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_output_is_attention_over_quantized_keys_after_rope_and_values(
    llama: Factory, rotated: Factory, hidden: Tensor, kv_heads: int, rotate: bool
) -> None:
    rotation = RotationConfig(r1=False, r2=True)
    model = rotated(llama(num_key_value_heads=kv_heads, attention_bias=True), rotation, ONLY_KV)
    query, key, value = states(model, hidden, rotate=rotate)
    quantizer = FakeQuantizer(KV)
    found, _ = run_attention(model, hidden, rotate=rotate, quantize=True)
    expected = naive_attention(query, quantizer(key), quantizer(value))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
    unquantized = naive_attention(query, key, value)
    assert np.abs(found.numpy() - unquantized).max() > 1e-2
    plain, _ = run_attention(model, hidden, rotate=rotate, quantize=False)
    np.testing.assert_allclose(plain.numpy(), unquantized, rtol=1e-4, atol=1e-5)


def test_switched_off_the_logits_are_those_of_plain_attention_bit_for_bit(
    llama: Factory, rotated: Factory, token_ids: Tensor
) -> None:
    source = llama(attention_bias=True)
    model = rotated(source, NO_ROTATION, ONLY_KV, ready=False)
    assert source.config._attn_implementation == "sdpa"
    assert model.network.config._attn_implementation == PREFIX + "sdpa"
    assert torch.equal(model.logits(token_ids), source(token_ids).logits)
    with model.mode.set(rotate=False, quantize=True):
        assert relative_error(source(token_ids).logits, model.logits(token_ids)) > 1e-3


def test_padding_is_masked_as_in_plain_attention(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    source = llama(attention_bias=True)
    model = rotated(source, NO_ROTATION, ONLY_KV, ready=False)
    mask = torch.ones_like(token_ids)
    mask[0, :4] = 0
    expected = source(token_ids, attention_mask=mask).logits
    assert not torch.allclose(expected[0, 4:], source(token_ids).logits[0, 4:])
    assert torch.equal(model.network(token_ids, attention_mask=mask).logits, expected)


def test_without_a_cache_quantizer_attention_stays_as_it_is(llama: Factory, rotated: Factory) -> None:
    model = rotated(llama(), quant=QuantConfig(weights=QuantSpec(4)))
    assert model.network.config._attn_implementation == "sdpa"


def test_r2_acts_on_the_values_before_they_are_quantized(llama: Factory, rotated: Factory, hidden: Tensor) -> None:
    model = rotated(llama(), RotationConfig(r1=False, r2=True), ONLY_KV)
    _, key, value = states(model, hidden, rotate=False)
    _, same_key, rotated_value = states(model, hidden, rotate=True)
    torch.testing.assert_close(rotated_value, value @ model.bank["R2_0"])
    assert torch.equal(same_key, key)


def test_a_token_does_not_depend_on_later_ones(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    model = rotated(llama(), quant=ONLY_KV)
    changed = token_ids.clone()
    changed[:, 6:] = 0
    with torch.no_grad(), model.mode.set(rotate=True, quantize=True):
        first, second = model.logits(token_ids), model.logits(changed)
    torch.testing.assert_close(first[:, :6], second[:, :6])
    assert not torch.allclose(first[:, 6:], second[:, 6:])


def test_gradients_pass_through_the_quantized_cache(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    model = rotated(llama(), RotationConfig(r1=False, r2=True), ONLY_KV)
    with model.mode.set(rotate=True, quantize=True):
        model.logits(token_ids).square().sum().backward()
    assert all(matrix.grad.abs().max() > 0 for _, matrix in model.bank.items())


def test_the_cache_quantizer_is_attached_but_not_registered(llama: Factory, rotated: Factory) -> None:
    source = llama()
    model = rotated(source, NO_ROTATION, ONLY_KV)
    for layer in model.network.model.layers:
        assert isinstance(layer.self_attn.cache, Cache)
    assert set(model.network.state_dict()) == set(source.state_dict())


def test_a_group_size_that_does_not_divide_the_head_is_refused(llama: Factory, rotated: Factory) -> None:
    with pytest.raises(ValueError, match=r"quant.kv.group_size=5 does not divide the width 12.*keys and values"):
        rotated(llama(), quant=QuantConfig(kv=QuantSpec(4, group_size=5)))


@pytest.mark.parametrize(
    ("quant", "named"),
    [
        (
            QuantConfig(weights=QuantSpec(4, group_size=32)),
            "weights.group_size=32 .* 48;.*layers.0.self_attn.q_proj",
        ),
        (
            QuantConfig(activations=QuantSpec(4, group_size=48)),
            "activations.group_size=48 .* 80;.*layers.0.mlp.down_proj",
        ),
    ],
)
def test_widths_that_a_group_size_does_not_divide_are_named(
    llama: Factory, rotated: Factory, quant: QuantConfig, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        rotated(llama(), quant=quant).check_widths()
