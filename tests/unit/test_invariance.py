"""Unquantized, a prepared Llama's logits are the original's; a fault in preparation is found and its layer named."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rotexp.orthogonal.hadamard import random_orthogonal
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.invariance import check_invariance, logit_error, relative_error, trace
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.merge import prepare
from rotexp.rotation.norms import fold_norms
from rotexp.rotation.options import RotationConfig, RotationInit

Factory = Callable[..., Any]
PLACEMENTS = {
    "none": RotationConfig(r1=False, r2=False, r4=False),
    "r1": RotationConfig(r1=True, r2=False, r4=False),
    "r2": RotationConfig(r1=False, r2=True, r4=False),
    "r4": RotationConfig(r1=False, r2=False, r4=True),
    "all": RotationConfig(r1=True, r2=True, r4=True),
    "all random": RotationConfig(r1=True, r2=True, r4=True, init=RotationInit.random),
}
SHAPES = [
    {"attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    for bias, tied, kv_heads in product((False, True), (False, True), (2, 4))
] + [
    {"attention_bias": True, "mlp_bias": False, "head_dim": 20},
    {"attention_bias": False, "mlp_bias": True, "num_key_value_heads": 1},
]


def logits(model: Any, token_ids: Tensor, *, rotate: bool) -> Tensor:
    with torch.no_grad(), model.mode.set(rotate=rotate, quantize=False):
        return model.logits(token_ids)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(f"{k}={v}" for k, v in shape.items()))
def test_rotated_logits_equal_the_originals(
    llama: Factory, rotated: Factory, token_ids: Tensor, shape: dict[str, Any], placement: RotationConfig
) -> None:
    source = llama(**shape)
    model = rotated(source, placement)
    original = source(token_ids).logits
    assert relative_error(original, logits(model, token_ids, rotate=True)) <= 1e-5
    assert relative_error(original, logits(model, token_ids, rotate=False)) <= 1e-5
    assert len(model.bank) == placement.r1 + placement.r2 * source.config.num_hidden_layers


def rms_norm_of_any_dtype(norm: Any, hidden: Tensor) -> Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_in_float64_they_are_equal_to_twelve_digits(
    llama: Factory, rotated: Factory, token_ids: Tensor, placement: RotationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", rms_norm_of_any_dtype)  # the original computes in float32
    source = llama(attention_bias=True, mlp_bias=True, dtype=torch.float64)
    model = rotated(source, placement)
    generator = torch.Generator().manual_seed(1)
    for name, matrix in tuple(model.bank.items()):
        model.bank.prune([name])
        model.bank.add(name, random_orthogonal(len(matrix), generator=generator, dtype=torch.float64))
    assert relative_error(source(token_ids).logits, logits(model, token_ids, rotate=True)) <= 1e-12


def test_rotations_really_act_on_residual_stream_values_and_down_projection_input(
    llama: Factory, rotated: Factory, token_ids: Tensor
) -> None:
    model = rotated(llama(attention_bias=True, mlp_bias=True), PLACEMENTS["all"])
    seen: dict[str, Tensor] = {}
    for name, module in model.network.named_modules():
        if isinstance(module, RotatedLinear | torch.nn.Embedding):
            module.register_forward_hook(lambda module, inputs, output, name=name: seen.__setitem__(name, output))
    logits(model, token_ids, rotate=False)
    plain = dict(seen)
    logits(model, token_ids, rotate=True)
    r1, r2 = model.bank["R1"], torch.block_diag(model.bank["R2_0"], model.bank["R2_0"])
    expected = {
        "model.embed_tokens": plain["model.embed_tokens"] @ r1,
        "model.layers.0.self_attn.v_proj": plain["model.layers.0.self_attn.v_proj"] @ r2,
        "model.layers.0.self_attn.q_proj": plain["model.layers.0.self_attn.q_proj"],
        "model.layers.1.self_attn.o_proj": plain["model.layers.1.self_attn.o_proj"] @ r1,
        "model.layers.1.mlp.down_proj": plain["model.layers.1.mlp.down_proj"] @ r1,
        "model.layers.1.mlp.up_proj": plain["model.layers.1.mlp.up_proj"],
    }
    for name, output in expected.items():
        torch.testing.assert_close(seen[name], output, rtol=1e-4, atol=1e-4)
    down = model.network.model.layers[0].mlp.down_proj
    assert down.online.order == down.weight.shape[1] == 80
    assert model.online == {"R4": 80}


def test_every_rotation_says_where_it_acts(llama: Factory, rotated: Factory) -> None:
    model = rotated(llama())
    assert model.placements == {
        "R1": "residual stream",
        "R2_0": "values and output of model.layers.0.self_attn",
        "R2_1": "values and output of model.layers.1.self_attn",
    }


def test_an_order_without_a_hadamard_matrix_is_refused(llama: Factory, rotated: Factory) -> None:
    with pytest.raises(ValueError, match="82"):
        rotated(llama(intermediate_size=82), PLACEMENTS["r4"])


def test_folding_leaves_unit_gains_and_the_same_model(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    source = llama(attention_bias=True, mlp_bias=True)
    model = rotated(source, PLACEMENTS["none"], ready=False)
    assert torch.equal(logits(model, token_ids, rotate=False), source(token_ids).logits)
    fold_norms(model.network, model.spec)
    gains = [parameter for name, parameter in model.network.named_parameters() if "norm" in name]
    assert len(gains) == 5
    assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)
    assert 0.0 < relative_error(source(token_ids).logits, logits(model, token_ids, rotate=False)) <= 1e-5


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def prove(model: Any, token_ids: Tensor, change: Callable[[], None]) -> float:
    """Check the rotated model after `change` against what it was before, as a run does."""
    dtype = model.network.lm_head.weight.dtype
    original = trace(model, token_ids, rotate=False)
    change()
    model.mode.refusal = None  # whatever stands for the preparation
    prepared = trace(model, token_ids, rotate=True)
    return check_invariance(original, prepared, layers=model.spec.layers, dtype=dtype)


@DTYPES
def test_the_proof_passes_a_right_preparation_and_returns_its_error(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype
) -> None:
    source = llama(attention_bias=True, mlp_bias=True, dtype=dtype)
    model = rotated(source, PLACEMENTS["all"], ready=False)

    error = prove(model, token_ids, lambda: prepare(model))
    original, found = source(token_ids).logits.float(), logits(model, token_ids, rotate=True).float()
    assert error == logit_error(original, found, dtype=dtype)
    errors = (found - original).norm(dim=-1) / original.norm(dim=-1)
    expected = errors.median() if dtype is not torch.float32 else (found - original).abs().max() / original.abs().max()
    assert error == pytest.approx(expected.item())


def test_the_traced_residual_stream_is_rotated_back(llama: Factory, rotated: Factory, token_ids: Tensor) -> None:
    model = rotated(llama(attention_bias=True, mlp_bias=True))
    hooks = [dict(module._forward_hooks) for module in model.network.modules()]
    plain, turned = (trace(model, token_ids, rotate=rotate) for rotate in (False, True))
    assert len(plain.layers) == 2
    for before, after in zip(plain.layers, turned.layers, strict=True):
        assert relative_error(before, after) < 1e-5
    matrix = model.bank["R1"].detach().double()
    model.bank.prune(["R1"])
    model.bank.add("R1", matrix)
    assert relative_error(plain.layers[1], trace(model, token_ids, rotate=True).layers[1]) < 1e-5
    assert [dict(module._forward_hooks) for module in model.network.modules()] == hooks


@DTYPES
def test_a_bias_left_unrotated_is_found_in_its_layer(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rotated(llama(attention_bias=True, mlp_bias=True, dtype=dtype), ready=False)
    faulty = model.network.model.layers[1].mlp.down_proj

    def forward(x: Tensor) -> Tensor:
        rotation = faulty.output_rotation
        return (rotation.rotate(F.linear(x, faulty.weight)) if model.mode.rotate else F.linear(x, faulty.weight)) + bias

    bias = faulty.bias.clone()
    monkeypatch.setattr(faulty, "forward", forward)
    with pytest.raises(ArithmeticError, match=r"worst layer model\.layers\.1 .*first exceeded in model\.layers\.1$"):
        prove(model, token_ids, lambda: fold_norms(model.network, model.spec))


@DTYPES
def test_centered_embeddings_are_found_from_the_first_layer_on(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype
) -> None:
    model = rotated(llama(dtype=dtype), ready=False)

    def change() -> None:
        fold_norms(model.network, model.spec)
        embedding = model.network.model.embed_tokens.weight
        embedding.sub_(embedding.mean(-1, keepdim=True))

    with pytest.raises(ArithmeticError, match=r"worst layer model\.layers\.\d .*first exceeded in model\.layers\.0$"):
        prove(model, token_ids, change)


@DTYPES
def test_a_gain_that_is_not_folded_is_found_in_its_layer(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype
) -> None:
    model = rotated(llama(dtype=dtype), PLACEMENTS["r1"], ready=False)

    def change() -> None:
        norm = model.network.model.layers[1].post_attention_layernorm
        gain = norm.weight.clone()
        fold_norms(model.network, model.spec)
        for reader in ("gate_proj", "up_proj"):
            weight = model.network.model.layers[1].mlp.get_submodule(reader).weight
            weight.div_(gain)
        norm.weight.copy_(gain)

    with pytest.raises(ArithmeticError, match=r"worst layer model\.layers\.1 .*first exceeded in model\.layers\.1$"):
        prove(model, token_ids, change)


@DTYPES
def test_a_gain_dropped_instead_of_folded_is_found_in_the_head(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype
) -> None:
    model = rotated(llama(dtype=dtype), ready=False)

    def change() -> None:
        head, gain = model.network.lm_head.weight, model.network.model.norm.weight.clone()
        fold_norms(model.network, model.spec)
        head.div_(gain)

    with pytest.raises(ArithmeticError, match=r"worst layer model\.layers\.\d .*every layer is within it.*the head"):
        prove(model, token_ids, change)


@DTYPES
def test_a_hadamard_without_its_counterpart_is_found(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype
) -> None:
    model = rotated(llama(dtype=dtype), PLACEMENTS["r4"], ready=False)

    def change() -> None:
        weight = model.network.model.layers[0].mlp.down_proj.weight
        kept = weight.clone()
        prepare(model)
        weight.copy_(kept)

    with pytest.raises(ArithmeticError, match=r"worst layer model\.layers\.\d .*first exceeded in model\.layers\.0$"):
        prove(model, token_ids, change)


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.001), (torch.bfloat16, 1.1), (torch.float16, 1.03)], ids=str
)
def test_a_matrix_that_is_not_orthogonal_is_found(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype, factor: float
) -> None:
    model = rotated(llama(dtype=dtype), ready=False)

    def change() -> None:
        fold_norms(model.network, model.spec)
        model.bank.assign({"R2_1": factor * model.bank["R2_1"]})

    with pytest.raises(ArithmeticError, match="worst layer"):
        prove(model, token_ids, change)


@DTYPES
def test_logits_that_are_not_numbers_do_not_pass(
    llama: Factory, rotated: Factory, token_ids: Tensor, dtype: torch.dtype
) -> None:
    model = rotated(llama(dtype=dtype), ready=False)

    def change() -> None:
        fold_norms(model.network, model.spec)
        model.network.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))

    with pytest.raises(
        ArithmeticError, match=r"by nan .*worst layer model\.layers\.1 .*first exceeded in model\.layers\.1$"
    ):
        prove(model, token_ids, change)


def test_a_model_without_rotations_has_an_empty_bank(llama: Factory, rotated: Factory) -> None:
    model = rotated(llama(), PLACEMENTS["none"])
    assert isinstance(model.bank, RotationBank)
    assert len(model.bank) == 0
    assert isinstance(model.network.lm_head, torch.nn.Linear)
