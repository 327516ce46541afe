"""In every family the rotations act, change nothing unquantized, receive gradients, and merge into the same bits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from families import (
    BLOCK,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    REACHABLE,
    WANTED,
    WITH_LAYER_NORM,
    WITH_R1,
    WITHOUT_R1,
    from_config,
    logits,
    make_source,
    make_token_ids,
    rotated,
    wanted,
)
from torch import Tensor, nn

from rotexp.models.arch import decoder_layers, head_name
from rotexp.orthogonal.hadamard import HadamardTransform
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation import attention, norms
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.invariance import LIMITS, check_invariance, check_merged, relative_error, trace
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit

EXACT = 1e-5
W4 = QuantSpec(4)
A4 = QuantSpec(4, symmetric=False)
NO_ROTATION = RotationConfig(r1=False, r2=False)
SPARSE = ["mixtral", "qwen2_moe", "qwen3_moe with a dense layer"]
FUSED = ["phi3", "gpt_neox"]


def quant_of(name: str) -> QuantConfig:
    """Return four bits for weights and activations, and for keys and values where they can be reached."""
    return QuantConfig(weights=W4, activations=A4, kv=A4 if FAMILIES[name].reachable else QuantSpec())


def expected_rotations(rotation: RotationConfig) -> set[str]:
    return ({"R1"} if rotation.r1 else set()) | ({"R2_0", "R2_1"} if rotation.r2 else set())


@pytest.fixture(scope="module")
def token_ids() -> Tensor:
    return make_token_ids()


@pytest.fixture(scope="module")
def sources() -> dict[str, Any]:
    """The Hugging Face model of every family; tests take copies of it."""
    return {name: make_source(name) for name in FAMILIES}


def assert_invariant(source: Any, rotation: RotationConfig, token_ids: Tensor) -> RotatedModel:
    """Check a model's logits before it is prepared, prepared and merged against its source's; return it merged."""
    original = source(token_ids, use_cache=False).logits
    model = rotated(source, rotation, ready=False)
    assert torch.equal(logits(model, token_ids, rotate=False), original)
    prepare(model)
    assert relative_error(original, logits(model, token_ids, rotate=False)) <= EXACT
    assert relative_error(original, logits(model, token_ids)) <= EXACT
    assert set(dict(model.bank.items())) == expected_rotations(rotation)
    merge(model)
    assert relative_error(original, logits(model, token_ids)) <= EXACT
    assert relative_error(original, logits(model, token_ids, rotate=bool(rotation.r3))) <= EXACT
    return model


@pytest.mark.parametrize("placement", WANTED)
@pytest.mark.parametrize("name", FAMILIES)
def test_rotated_and_merged_logits_equal_the_originals(
    sources: dict[str, Any], token_ids: Tensor, name: str, placement: str
) -> None:
    rotation = wanted(name, placement)
    model = assert_invariant(sources[name], rotation, token_ids)
    assert any(key.startswith("R4") for key in model.online) is bool(rotation.r4)
    assert ("R3" in model.online) is bool(rotation.r3)


@pytest.mark.parametrize("init", [RotationInit.random, RotationInit.identity])
@pytest.mark.parametrize("block_size", [None, BLOCK])
@pytest.mark.parametrize("name", ["opt", "gpt_neox", "phi3", "gemma", "qwen2_moe", "cohere"])
def test_whatever_the_rotations_start_from(
    sources: dict[str, Any], token_ids: Tensor, name: str, block_size: int | None, init: RotationInit
) -> None:
    rotation = replace(wanted(name, "all"), init=init, block_size=block_size)
    model = rotated(sources[name], rotation, ready=False)
    is_identity = torch.equal(model.bank["R2_0"], torch.eye(len(model.bank["R2_0"])))
    assert is_identity is (init is RotationInit.identity)
    assert_invariant(sources[name], rotation, token_ids)


def cross(name: str, **choices: tuple[Any, ...]) -> list[Any]:
    """Return every combination of config values of a family as test parameters."""
    values = [dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values())]
    return [pytest.param(name, one, id=f"{name} {' '.join(f'{k}={v}' for k, v in one.items())}") for one in values]


TIED, GROUPS, NO_YES = (False, True), (1, 2, 4), (False, True)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *cross("starcoder2", tie_word_embeddings=TIED, num_key_value_heads=GROUPS, use_bias=NO_YES),
        *cross("gemma", tie_word_embeddings=TIED, num_key_value_heads=(1, 4), attention_bias=NO_YES),
        *cross("cohere", tie_word_embeddings=TIED, num_key_value_heads=(1, 4), attention_bias=NO_YES),
        *cross("phi3", tie_word_embeddings=TIED, num_key_value_heads=GROUPS),
        *cross("qwen2", tie_word_embeddings=TIED, num_key_value_heads=GROUPS),
        *cross("mixtral", tie_word_embeddings=TIED, num_key_value_heads=GROUPS),
        *cross("opt", tie_word_embeddings=TIED, enable_bias=NO_YES, layer_norm_elementwise_affine=NO_YES),
        *cross("gpt_neox", tie_word_embeddings=TIED, attention_bias=NO_YES, use_parallel_residual=NO_YES),
    ],
)
def test_tied_or_not_biased_or_not_grouped_or_not(name: str, changes: dict[str, Any], token_ids: Tensor) -> None:
    source = make_source(name, **changes)
    tied = source.get_input_embeddings().weight is source.get_output_embeddings().weight
    assert tied is changes["tie_word_embeddings"]
    assert_invariant(source, wanted(name, "all"), token_ids)


@pytest.mark.parametrize("name", WITHOUT_R1)
def test_r1_that_cannot_exist_is_refused_if_asked_for_and_left_out_with_a_warning_if_not(
    sources: dict[str, Any], token_ids: Tensor, name: str
) -> None:
    reason = rf"model_type={sources[name].config.model_type}: .*{FAMILIES[name].norm}"
    with pytest.raises(ValueError, match=rf"rotation\.r1=true: cannot act: {reason}.*; set rotation\.r1=false"):
        rotated(sources[name], RotationConfig(r1=True))
    model = rotated(sources[name], RotationConfig(r1=None, r2=None, r3=None, r4=None), quant_of(name))
    assert len(model.warnings) == 1
    assert re.match(rf"R1 is left out: {reason}", model.warnings[0])
    assert set(dict(model.bank.items())) == {"R2_0", "R2_1"}
    assert model.online.keys() == {"R3", "R4"}
    assert relative_error(sources[name](token_ids).logits, logits(model, token_ids)) <= EXACT


@pytest.mark.parametrize("name", WITH_R1)
def test_what_can_exist_is_placed_without_a_warning(sources: dict[str, Any], name: str) -> None:
    model = rotated(sources[name], RotationConfig())
    assert model.warnings == []
    assert set(dict(model.bank.items())) == {"R1", "R2_0", "R2_1"}
    assert model.online == {}
    assert model.placements["R1"] == "residual stream"
    assert model.placements["R2_1"].endswith(".1." + model.spec.attention)


def streams(model: RotatedModel, token_ids: Tensor, *, rotate: bool) -> list[Tensor]:
    """Return what the decoder layers write: (batch, tokens, hidden) each."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model.network, model.spec)]
    logits(model, token_ids, rotate=rotate)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("placement", ["r1", "all", "blocks"])
@pytest.mark.parametrize("name", WITH_R1)
def test_r1_turns_the_residual_stream(sources: dict[str, Any], token_ids: Tensor, name: str, placement: str) -> None:
    model = rotated(sources[name], wanted(name, placement))
    r1 = model.bank["R1"].detach()
    whole = torch.block_diag(*r1) if r1.ndim == 3 else r1
    plain, turned = (streams(model, token_ids, rotate=rotate) for rotate in (False, True))
    assert len(plain) == 2
    for before, after in zip(plain, turned, strict=True):
        assert relative_error(before @ whole, after) <= EXACT
        assert relative_error(before, after) > 0.1


@pytest.mark.parametrize("name", WITH_LAYER_NORM)
def test_a_residual_stream_behind_layer_norms_loses_its_mean(
    sources: dict[str, Any], token_ids: Tensor, name: str
) -> None:
    model = rotated(sources[name], wanted(name, "r1"), ready=False)
    before = streams(model, token_ids, rotate=False)
    prepare(model)
    for original, centred in zip(before, streams(model, token_ids, rotate=False), strict=True):
        assert original.mean(-1).abs().max() > 0.1
        assert centred.mean(-1).abs().max() < 1e-4
        assert relative_error(original - original.mean(-1, keepdim=True), centred) <= EXACT


def outputs_of(model: RotatedModel, token_ids: Tensor, name: str, *, rotate: bool) -> Tensor:
    """Return the first layer's `name`'s output."""
    seen: list[Tensor] = []
    module = decoder_layers(model.network, model.spec)[0].get_submodule(name)
    hook = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits(model, token_ids, rotate=rotate)
    hook.remove()
    return seen[0]


def split_fused(name: str, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, and values, each (batch, tokens, heads, head_dim)."""
    heads = outputs.unflatten(-1, (-1, HEAD_DIM))
    if name == "phi3":  # all queries, all keys, all values
        return heads[..., : HEADS + 2, :], heads[..., HEADS + 2 :, :]
    triples = heads.unflatten(-2, (HEADS, 3))  # query, key and value of each head
    return triples[..., :2, :].flatten(-3, -2), triples[..., 2, :]


@pytest.mark.parametrize("name", FUSED)
def test_r2_turns_the_values_of_a_fused_linear_and_nothing_else(
    sources: dict[str, Any], token_ids: Tensor, name: str
) -> None:
    model = rotated(sources[name], wanted(name, "r2"))
    plain, turned = (
        split_fused(name, outputs_of(model, token_ids, model.spec.value, rotate=rotate)) for rotate in (False, True)
    )
    assert torch.equal(turned[0], plain[0])
    torch.testing.assert_close(turned[1], plain[1] @ model.bank["R2_0"])
    assert relative_error(plain[1], turned[1]) > 0.1


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.split()[0] not in FUSED])
def test_r2_turns_the_values_of_every_head(sources: dict[str, Any], token_ids: Tensor, name: str) -> None:
    model = rotated(sources[name], wanted(name, "r2"))
    r2 = model.bank["R2_0"].detach()
    plain, turned = (outputs_of(model, token_ids, model.spec.value, rotate=rotate) for rotate in (False, True))
    heads = plain.shape[-1] // len(r2)
    torch.testing.assert_close(turned, plain @ torch.block_diag(*[r2] * heads), rtol=1e-4, atol=1e-4)
    assert relative_error(plain, turned) > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_r4_turns_what_the_down_projections_read(sources: dict[str, Any], token_ids: Tensor, name: str) -> None:
    model = rotated(sources[name], wanted(name, "r4"))
    found = [
        (source, module, "down_proj" if isinstance(module, RotatedExperts) else "weight")
        for path, module in model.network.named_modules()
        if isinstance(module, (RotatedLinear, RotatedExperts)) and module.online is not None
        for source in [sources[name].get_submodule(path)]
    ]
    assert found
    for source, module, weight in found:
        width = getattr(source, weight).shape[-1]
        turned = getattr(source, weight) @ HadamardTransform(width).matrix(torch.float32)
        assert module.online is not None
        assert module.online.order == width
        torch.testing.assert_close(getattr(module, weight), turned, rtol=1e-4, atol=1e-5)


Attended = list[tuple[Tensor, Tensor]]


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Attended:
    """Collect queries and keys as the attention product meets them, layer by layer."""
    seen: Attended = []
    real = attention._attention

    def recording(module: nn.Module, implementation: str) -> Any:
        attend = real(module, implementation)

        def call(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
            seen.append((query, key))
            return attend(module, query, key, *rest, **options)

        return call

    monkeypatch.setattr(attention, "_attention", recording)
    return seen


def scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT


@pytest.mark.parametrize("name", REACHABLE)
def test_r3_turns_the_keys_that_a_cache_sees_and_leaves_the_scores(
    sources: dict[str, Any], token_ids: Tensor, name: str, attended: Attended, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rotated(sources[name], wanted(name, "r3"))
    cached: list[Tensor] = []

    def keep(_cache: attention.Cache, states: Tensor) -> Tensor:
        cached.append(states)
        return states

    monkeypatch.setattr(attention.Cache, "quantize", keep)
    for rotate in (False, True):
        logits(model, token_ids, rotate=rotate)
    assert len(cached) == 8  # keys and values of two layers, twice
    hadamard = HadamardTransform(model.online["R3"]).matrix(torch.float32)
    torch.testing.assert_close(cached[4], cached[0] @ hadamard, rtol=1e-4, atol=1e-4)
    assert relative_error(cached[0], cached[4]) > 0.1
    assert torch.equal(cached[5], cached[1])  # the first layer's values
    assert relative_error(scores(*attended[0]), scores(*attended[2])) <= EXACT


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_reach_every_learned_rotation(sources: dict[str, Any], token_ids: Tensor, name: str) -> None:
    rotation = wanted(name, "all")
    model = rotated(sources[name], rotation, quant_of(name))
    with model.mode.set(rotate=True, quantize=True):
        model.logits(token_ids).square().mean().backward()
    reached = {path for path, parameter in model.network.named_parameters() if parameter.grad is not None}
    assert reached == {f"rotation_bank.{key}" for key in expected_rotations(rotation)}
    for key, matrix in model.bank.items():
        assert matrix.grad is not None, key
        assert matrix.grad.isfinite().all(), key
        assert matrix.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", REACHABLE)
def test_quantized_keys_and_values_change_the_logits_as_their_bits_allow(
    sources: dict[str, Any], token_ids: Tensor, name: str
) -> None:
    original = sources[name](token_ids, use_cache=False).logits
    errors = []
    for bits in (2, 8):
        model = rotated(sources[name], NO_ROTATION, QuantConfig(kv=QuantSpec(bits, symmetric=False)))
        assert torch.equal(logits(model, token_ids, rotate=False), original)
        errors.append(relative_error(original, logits(model, token_ids, rotate=False, quantize=True)))
    assert errors[0] > 1e-2
    assert 0 < errors[1] < errors[0] / 5


def test_soft_caps_are_kept_where_keys_and_values_are_quantized(token_ids: Tensor) -> None:
    name = "gemma2 with binding caps"
    source = make_source(name, final_logit_softcapping=None)
    assert source.config._attn_implementation == "eager"
    original = source(token_ids).logits
    uncapped = make_source(name, final_logit_softcapping=None, attn_logit_softcapping=None)(token_ids).logits
    model = rotated(source, wanted(name, "all"), QuantConfig(kv=QuantSpec(8, symmetric=False)))
    error = relative_error(original, logits(model, token_ids, quantize=True))
    assert 0 < error < relative_error(original, uncapped) / 5


def test_an_attention_that_cannot_be_reached_is_refused_for_what_needs_it(
    sources: dict[str, Any], token_ids: Tensor
) -> None:
    source = sources["stablelm"]
    with pytest.raises(ValueError, match=r"rotation\.r3=true: cannot act: StableLm.* set rotation\.r3=false"):
        rotated(source, RotationConfig(r3=True))
    with pytest.raises(ValueError, match=r"quant\.kv\.bits=4: cannot act: StableLm.*choose a quant without kv"):
        rotated(source, quant=QuantConfig(kv=A4))
    model = rotated(source, RotationConfig(r3=None, r4=True))
    assert [warning.split(":")[0] for warning in model.warnings] == ["R3 is left out"]
    assert model.online.keys() == {"R4"}
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= EXACT


def make_inputs(module: Any, *, seed: int) -> tuple[Tensor, ...]:
    """Return random inputs for a rotated linear, or for experts: states, chosen experts and their shares."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(module, RotatedLinear):
        return (torch.randn(2, 7, module.weight.shape[1], generator=generator),)
    states = torch.randn(9, HIDDEN, generator=generator)
    chosen = torch.stack([torch.randperm(len(module.down_proj), generator=generator)[:2] for _ in states])
    return states, chosen, torch.rand(9, 2, generator=generator)


@pytest.mark.parametrize("placement", ["all", "blocks"])
@pytest.mark.parametrize("name", FAMILIES)
def test_merging_leaves_every_weight_quantized_module_the_same_bits(
    sources: dict[str, Any], name: str, placement: str
) -> None:
    model = rotated(sources[name], wanted(name, placement), quant_of(name))
    quantized = [
        module
        for module in model.rotated_modules
        if isinstance(module, RotatedExperts) or module.weight_quantizer.spec.enabled
    ]
    assert len(quantized) >= 2 * 4
    inputs = [make_inputs(module, seed=index) for index, module in enumerate(quantized)]
    with torch.no_grad(), model.mode.set(rotate=True, quantize=True):
        before = [module(*x) for module, x in zip(quantized, inputs, strict=True)]
        merge(model)
        for module, x, expected in zip(quantized, inputs, before, strict=True):
            assert torch.equal(module(*x), expected)
    assert len(model.bank) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_merging_a_quantized_model_without_r1_leaves_the_logits_the_same_bits(
    sources: dict[str, Any], token_ids: Tensor, name: str
) -> None:
    model = rotated(sources[name], replace(wanted(name, "all"), r1=False), quant_of(name))
    before = logits(model, token_ids, quantize=True)
    assert relative_error(logits(model, token_ids), before) > 1e-3
    merge(model)
    assert torch.equal(logits(model, token_ids, quantize=True), before)


@pytest.mark.parametrize("name", SPARSE)
def test_routers_choose_the_same_experts(sources: dict[str, Any], token_ids: Tensor, name: str) -> None:
    source = sources[name]
    routers = [path for path, _ in source.named_modules() if path.endswith("mlp.gate")]
    assert routers

    def chosen(network: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
        seen: list[Tensor] = []
        hooks = [
            network.get_submodule(path).register_forward_hook(lambda _module, _inputs, output: seen.append(output[2]))
            for path in routers
        ]
        run()
        for hook in hooks:
            hook.remove()
        return seen

    original = chosen(source, lambda: source(token_ids))
    model = rotated(source, wanted(name, "all"), quant_of(name))
    found = [chosen(model.network, lambda: logits(model, token_ids))]
    merge(model)
    found.append(chosen(model.network, lambda: logits(model, token_ids)))
    for one in found:
        assert all(torch.equal(*pair) for pair in zip(one, original, strict=True))
    assert len(torch.unique(torch.cat(original))) > 2


def everything_of(model: RotatedModel) -> dict[int, object]:
    tensors = [*model.network.parameters(), *model.network.buffers()]
    return {id(part): part for part in (*model.network.modules(), *model.hooked, model.mode, *tensors)}


@pytest.mark.parametrize("name", ["opt", "mixtral", "qwen2_moe", "gemma", "gpt_neox"])
def test_a_copied_model_shares_nothing(sources: dict[str, Any], token_ids: Tensor, name: str) -> None:
    model = rotated(sources[name], wanted(name, "all"), quant_of(name))
    before = logits(model, token_ids, quantize=True)
    twin = copy.deepcopy(model)
    assert not everything_of(model).keys() & everything_of(twin).keys()
    assert twin.network.get_submodule("rotation_bank") is twin.bank
    with model.mode.set(rotate=False, quantize=False):
        assert torch.equal(logits(twin, token_ids, quantize=True), before)
    twin.bank.assign({"R1": torch.eye(HIDDEN)})
    assert not torch.equal(logits(twin, token_ids, quantize=True), before)
    merge(twin)
    assert relative_error(sources[name](token_ids).logits, logits(twin, token_ids)) <= EXACT
    assert torch.equal(logits(model, token_ids, quantize=True), before)


@pytest.mark.parametrize("name", ["opt", "gpt_neox", "gpt_neox in sequence", "nemotron", "stablelm"])
def test_biases_that_take_up_the_norms_biases_are_added_as_zeros(sources: dict[str, Any], name: str) -> None:
    own = dict(sources[name].named_parameters())
    model = rotated(sources[name], wanted(name, "all"), ready=False)
    assert f"{head_name(model.network)}.bias" in model.added
    parameters = dict(model.network.named_parameters())
    assert {path for path in parameters if not path.startswith("rotation_bank")} - own.keys() >= model.added
    assert not model.added & own.keys()
    assert not any(parameters[path].any() or parameters[path].requires_grad for path in model.added)
    prepare(model)
    assert all(parameters[path].all() for path in model.added)


@pytest.mark.parametrize("name", ["llama", "gemma", "cohere", "opt without biases and gains", "phi"])
def test_nothing_is_added_where_norms_have_no_bias_or_readers_have_one(sources: dict[str, Any], name: str) -> None:
    assert rotated(sources[name], wanted(name, "r1")).added == set()


@pytest.mark.parametrize("name", ["opt", "gemma", "gpt_neox", "cohere", "mixtral"])
def test_norms_are_folded_only_where_r1_is_placed(sources: dict[str, Any], name: str) -> None:
    source = dict(sources[name].named_parameters())
    model = rotated(sources[name], wanted(name, "r2"))
    assert model.added == set()
    assert model.rms_norms == []
    for path, parameter in model.network.named_parameters():
        if path in source:
            assert torch.equal(parameter, source[path]), path


def prove(
    model: RotatedModel, token_ids: Tensor, change: Callable[[], None], *, dtype: torch.dtype = torch.float32
) -> float:
    """Check the rotated model after `change` against what it was before, as a run does."""
    original = trace(model, token_ids, rotate=False)
    change()
    found = trace(model, token_ids, rotate=True)
    return check_invariance(original, found, layers=model.spec.layers, dtype=dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_proof_passes_a_right_preparation(sources: dict[str, Any], token_ids: Tensor, name: str) -> None:
    model = rotated(sources[name], wanted(name, "all"), ready=False)
    assert prove(model, token_ids, lambda: prepare(model)) <= EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_proofs_pass_a_right_preparation_and_merge_that_are_rounded(
    name: str, dtype: torch.dtype, token_ids: Tensor
) -> None:
    """Also where rounding sends single tokens to other experts, as in this qwen2_moe in bfloat16."""
    model = rotated(make_source(name, dtype=dtype), wanted(name, "all"), ready=False)
    original = trace(model, token_ids, rotate=False)
    assert 1e-4 < prove(model, token_ids, lambda: prepare(model), dtype=dtype) < 0.5 * LIMITS[dtype]
    merge(model)
    assert check_merged(original, model, dtype=dtype) < 0.5 * LIMITS[dtype]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param("mixtral", {"centred": True}, id="centring an RMSNorm model"),
        pytest.param("phi3", {"centred": True}, id="centring a fused RMSNorm model"),
        pytest.param("gpt_neox", {"centred": False}, id="not centring a LayerNorm model"),
        pytest.param("cohere", {"centred": False}, id="not centring a LayerNorm model without biases"),
        pytest.param("gemma", {"gain_offset": 0.0}, id="folding w instead of 1 + w"),
        pytest.param("nemotron", {"gain_offset": 0.0}, id="folding w instead of 1 + w of a LayerNorm"),
        pytest.param("qwen2", {"gain_offset": 1.0}, id="folding 1 + w instead of w"),
        pytest.param("opt", {"eps": 0.5}, id="another eps"),
    ],
)
def test_a_norm_taken_for_another_kind_fails(
    sources: dict[str, Any],
    token_ids: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mistake: dict[str, Any],
) -> None:
    real = norms.probe_norm
    model = rotated(sources[name], wanted(name, "r1"), ready=False)
    monkeypatch.setattr(norms, "probe_norm", lambda *args, **named: replace(real(*args, **named), **mistake))
    with pytest.raises(ArithmeticError, match=r"first exceeded in [\w.]+\.0$"):
        prove(model, token_ids, lambda: prepare(model))


def test_a_gain_folded_without_its_one_fails(sources: dict[str, Any], token_ids: Tensor) -> None:
    model = rotated(sources["gemma"], wanted("gemma", "r1"), ready=False)
    layer: Any = decoder_layers(model.network, model.spec)[1]
    gain = layer.input_layernorm.weight.clone()

    def change() -> None:
        prepare(model)
        for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            reader.weight.mul_(gain / (1 + gain))

    with pytest.raises(ArithmeticError, match=r"first exceeded in model\.layers\.1$"):
        prove(model, token_ids, change)


@pytest.mark.parametrize("name", ["opt", "gpt_neox", "starcoder2", "stablelm"])
def test_a_norms_bias_that_is_dropped_fails(
    sources: dict[str, Any], token_ids: Tensor, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = rotated(sources[name], wanted(name, "r1"), ready=False)
    monkeypatch.setattr(norms, "_fold_shift", lambda _group, _shift: None)
    with pytest.raises(ArithmeticError, match=r"first exceeded in [\w.]+\.0$"):
        prove(model, token_ids, lambda: prepare(model))


@pytest.mark.parametrize(
    ("name", "writer", "found"),
    [
        ("opt", "self_attn.out_proj", 0),
        ("opt", "fc2", 1),
        ("gpt_neox", "mlp.dense_4h_to_h", 1),
        ("phi", "mlp.fc2", 1),
    ],
)
def test_a_writers_bias_that_is_not_centred_fails_where_it_is_read_first(
    sources: dict[str, Any], token_ids: Tensor, name: str, writer: str, found: int
) -> None:
    model = rotated(sources[name], wanted(name, "r1"), ready=False)
    bias = decoder_layers(model.network, model.spec)[0].get_submodule(writer).get_parameter("bias")
    kept = bias.clone()

    def change() -> None:
        prepare(model)
        bias.add_(kept.mean())

    # The proof looks at the stream without its mean, so a mean shows only in what comes of reading it.
    with pytest.raises(ArithmeticError, match=rf"first exceeded in [\w.]+\.{found}$"):
        prove(model, token_ids, change)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("opt", "self_attn.v_proj"),
        ("opt", "fc2"),
        ("gpt_neox", "attention.query_key_value"),
        ("gpt_neox", "attention.dense"),
        ("llama with biases", "mlp.down_proj"),
        ("qwen2", "self_attn.v_proj"),
        ("starcoder2", "mlp.c_proj"),
    ],
)
def test_a_bias_that_is_not_rotated_fails_in_its_layer(
    sources: dict[str, Any], token_ids: Tensor, name: str, module: str
) -> None:
    model = rotated(sources[name], wanted(name, "all"), ready=False)
    bias = decoder_layers(model.network, model.spec)[1].get_submodule(module).get_parameter("bias")

    def change() -> None:
        prepare(model)
        kept, r1 = bias.clone(), model.bank.snapshot()["R1"]
        merge(model)
        bias.copy_(kept)
        model.bank.add("R1", r1)  # for the proof, which turns the residual stream back

    with pytest.raises(ArithmeticError, match=r"first exceeded in [\w.]+\.1$"):
        prove(model, token_ids, change)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["gpt_neox", "opt", "cohere", "gemma", "qwen3_moe with a dense layer"])
def test_the_proof_names_the_layer_whose_weight_is_spoiled(
    sources: dict[str, Any], token_ids: Tensor, name: str, layer: int
) -> None:
    model = rotated(sources[name], wanted(name, "all"), ready=False)

    def change() -> None:
        prepare(model)
        decoder_layers(model.network, model.spec)[layer].get_submodule(model.spec.output).get_parameter("weight")[
            3
        ].mul_(1.5)

    with pytest.raises(ArithmeticError, match=rf"first exceeded in {model.spec.layers}\.{layer}$"):
        prove(model, token_ids, change)


ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "r1": ("llama", {"hidden_size": 50, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12}),
    "r2": ("llama", {"head_dim": 30}),
    "r3": ("gemma", {"head_dim": 30}),
    "r4": ("llama", {"intermediate_size": 50}),
    "r4 experts": ("qwen3_moe with a dense layer", {"moe_intermediate_size": 30}),
}


@pytest.mark.parametrize("case", ORDERS)
def test_an_order_without_a_hadamard_matrix_is_refused_with_the_alternatives(case: str) -> None:
    name, changes = ORDERS[case]
    key, order = case.split()[0], "50" if 50 in changes.values() else "30"
    only: dict[str, Any] = {"r1": False, "r2": False} | {key: True}
    with pytest.raises(ValueError, match=rf"\b{order}\b.*(rotation\.{key}=false|rotation\.init=random)"):
        rotated(make_source(name, **changes), RotationConfig(**only))


@pytest.mark.parametrize("case", ["r3", "r4", "r4 experts"])
def test_an_online_transform_on_automatic_is_left_out_with_a_warning(case: str, token_ids: Tensor) -> None:
    name, changes = ORDERS[case]
    key, order = case.split()[0], "50" if 50 in changes.values() else "30"
    source = make_source(name, **changes)
    source.set_experts_implementation("eager")  # the other ones need widths that are multiples of 4
    automatic: dict[str, Any] = {"r1": False, "r2": False, "r3": False, "r4": False} | {key: None}
    model = rotated(source, RotationConfig(**automatic))
    assert [warning for warning in model.warnings if warning.startswith(key.upper()) and order in warning]
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= EXACT


@pytest.mark.parametrize("init", [RotationInit.random, RotationInit.identity])
@pytest.mark.parametrize("case", ["r1", "r2"])
def test_rotations_that_start_otherwise_need_no_hadamard_matrix(
    case: str, init: RotationInit, token_ids: Tensor
) -> None:
    name, changes = ORDERS[case]
    assert_invariant(make_source(name, **changes), RotationConfig(r1=True, r2=True, init=init), token_ids)


def test_the_same_config_can_be_placed_again(token_ids: Tensor) -> None:
    """Placement changes a config's attention; a copy of the placed model's config must not be taken for a plain one."""
    config = FAMILIES["gemma"].config()
    first = rotated(from_config(config), wanted("gemma", "all"), quant_of("gemma"))
    second = rotated(from_config(config), wanted("gemma", "all"), quant_of("gemma"))
    assert torch.equal(logits(first, token_ids, quantize=True), logits(second, token_ids, quantize=True))
