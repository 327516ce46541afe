"""Rotated experts compute, token by token, what one expert after another would; checked in float64."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import make_source, make_token_ids, rotated, wanted
from torch import Tensor, nn

from rotexp.orthogonal.hadamard import HadamardTransform, random_orthogonal
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.mode import Mode

HIDDEN, INNER, EXPERTS, TOKENS, CHOSEN = 12, 20, 5, 7, 2
OFF, W4, A4 = QuantSpec(), QuantSpec(4), QuantSpec(4, symmetric=False)
SPECS = {"unquantized": (OFF, OFF), "weights": (W4, OFF), "activations": (OFF, A4), "both": (W4, A4)}
MODES = list(product((False, True), (False, True)))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Plain(nn.Module):
    """What a Hugging Face module of experts holds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(normal(EXPERTS, 2 * INNER, HIDDEN, seed=1), requires_grad=False)
        self.down_proj = nn.Parameter(normal(EXPERTS, HIDDEN, INNER, seed=2), requires_grad=False)
        self.act_fn = nn.SiLU()


class Case(NamedTuple):
    """Rotated experts, and dense copies of what they are made of."""

    layer: RotatedExperts
    bank: RotationBank
    mode: Mode
    gate_up: Tensor
    down: Tensor


def make(
    specs: tuple[QuantSpec, QuantSpec] = (OFF, OFF), *, rotation: bool = True, online: bool = True, bake: bool = True
) -> Case:
    plain, bank, mode = Plain(), RotationBank(), Mode()
    matrix = random_orthogonal(HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    residual = bank.add("R1", matrix) if rotation else None
    gate_up, down = plain.gate_up_proj.clone(), plain.down_proj.clone()
    layer = RotatedExperts(
        plain,
        mode=mode,
        weights=specs[0],
        activations=specs[1],
        residual=residual,
        online=HadamardTransform(INNER) if online else None,
    )
    if bake:
        layer.bake()
    return Case(layer, bank, mode, gate_up, down)


def make_inputs(*, seed: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, for each two different experts (never the last one), and their shares."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    return normal(TOKENS, HIDDEN, seed=seed), chosen, normal(TOKENS, CHOSEN, seed=seed + 1).abs()


def reference_quantize(x: Tensor, spec: QuantSpec) -> Tensor:
    """Quantize each row in numpy, in float64."""
    if spec == OFF:
        return x
    values = x.detach().numpy()
    if spec.symmetric:
        scale = np.abs(values).max(-1, keepdims=True) / 7
        return torch.from_numpy(np.clip(np.rint(values / scale), -8, 7) * scale)
    low, high = np.minimum(values.min(-1, keepdims=True), 0), np.maximum(values.max(-1, keepdims=True), 0)
    scale = (high - low) / 15
    zero = np.rint(-low / scale)
    return torch.from_numpy((np.clip(np.rint(values / scale) + zero, 0, 15) - zero) * scale)


def straight_through(values: Tensor, spec: QuantSpec) -> Tensor:
    return values + (reference_quantize(values, spec) - values).detach()


def one_by_one(
    case: Case,
    inputs: tuple[Tensor, Tensor, Tensor],
    specs: tuple[QuantSpec, QuantSpec],
    *,
    residual: Tensor,
    online: bool,
) -> Tensor:
    """Run every token through its experts, one after another."""
    hidden, chosen, shares = inputs
    hadamard = HadamardTransform(INNER).matrix(torch.float64) if online else torch.eye(INNER, dtype=torch.float64)
    outputs = []
    for token in range(len(hidden)):
        output = torch.zeros(HIDDEN, dtype=torch.float64)
        for place in range(chosen.shape[1]):
            expert = int(chosen[token, place])
            gate_up = straight_through(case.gate_up[expert] @ residual, specs[0])
            down = straight_through(residual.T @ case.down[expert] @ hadamard, specs[0])
            both = gate_up @ straight_through(hidden[token], specs[1])
            inner = (F.silu(both[:INNER]) * both[INNER:]) @ hadamard
            output = output + shares[token, place] * (down @ straight_through(inner, specs[1]))
        outputs.append(output)
    return torch.stack(outputs)


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("rotation", [False, True])
def test_forward_equals_one_expert_after_another(
    rotation: bool, online: bool, specs: tuple[QuantSpec, QuantSpec]
) -> None:
    case = make(specs, rotation=rotation, online=online)
    inputs = make_inputs()
    for rotate, quantize in MODES:
        turned = rotation and rotate
        residual = case.bank["R1"].detach() if turned else torch.eye(HIDDEN, dtype=torch.float64)
        expected = one_by_one(case, inputs, specs if quantize else (OFF, OFF), residual=residual, online=online)
        with case.mode.set(rotate=rotate, quantize=quantize):
            torch.testing.assert_close(case.layer(*inputs), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["unquantized", "both"])
def test_gradients_are_those_of_one_expert_after_another(name: str) -> None:
    specs = SPECS[name]
    case = make(specs)
    hidden, chosen, shares = make_inputs()
    inputs = hidden.requires_grad_(), chosen, shares.requires_grad_()
    upstream = normal(TOKENS, HIDDEN, seed=6)
    leaves = [inputs[0], inputs[2], case.bank["R1"]]
    expected = one_by_one(case, inputs, specs, residual=case.bank["R1"], online=True)
    reference = torch.autograd.grad(expected, leaves, upstream)
    with case.mode.set(rotate=True, quantize=True):
        result = case.layer(*inputs)
    for mine, theirs in zip(torch.autograd.grad(result, leaves, upstream), reference, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SPECS)
def test_an_expert_that_nobody_chose_does_not_matter(name: str) -> None:
    case, inputs = make(SPECS[name]), make_inputs()
    assert EXPERTS - 1 not in inputs[1]
    for rotate, quantize in MODES:
        with case.mode.set(rotate=rotate, quantize=quantize):
            expected = case.layer(*inputs)
            kept = case.layer.gate_up_proj[-1].clone()
            case.layer.gate_up_proj[-1] = float("nan")
            assert torch.equal(case.layer(*inputs), expected)
            case.layer.gate_up_proj[-1] = kept


def test_one_expert_may_take_every_token_and_no_token_is_needed() -> None:
    case = make(SPECS["both"])
    hidden, _, shares = make_inputs()
    chosen = torch.full((TOKENS, 1), 3)
    with case.mode.set(rotate=True, quantize=True):
        expected = one_by_one(
            case, (hidden, chosen, shares), SPECS["both"], residual=case.bank["R1"].detach(), online=True
        )
        torch.testing.assert_close(case.layer(hidden, chosen, shares[:, :1]), expected, rtol=1e-11, atol=1e-11)
        assert case.layer(hidden[:0], chosen[:0], shares[:0, :1]).shape == (0, HIDDEN)


def test_parameters_keep_their_names_shapes_and_identity() -> None:
    plain = Plain()
    layer = RotatedExperts(plain, mode=Mode(), weights=W4, activations=A4, residual=None, online=None)
    assert layer.gate_up_proj is plain.gate_up_proj
    assert layer.down_proj is plain.down_proj
    assert layer.state_dict().keys() == plain.state_dict().keys()


def test_before_baking_the_online_transform_does_not_act_and_baking_twice_is_baking_once() -> None:
    case, inputs = make(bake=False), make_inputs()
    identity = torch.eye(HIDDEN, dtype=torch.float64)
    plain = one_by_one(case, inputs, (OFF, OFF), residual=identity, online=False)
    torch.testing.assert_close(case.layer(*inputs), plain, rtol=1e-11, atol=1e-11)
    case.layer.bake()
    once = case.layer.down_proj.clone()
    assert not torch.equal(once, case.down)
    case.layer.bake()
    assert torch.equal(case.layer.down_proj, once)
    torch.testing.assert_close(case.layer(*inputs), plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["weights", "both"])
def test_merged_weights_quantized_are_what_forward_used(name: str) -> None:
    case, inputs = make(SPECS[name]), make_inputs()
    with case.mode.set(rotate=True, quantize=True):
        used, before = case.layer._quantized_weights(), case.layer(*inputs)
    merged = case.layer.merged()
    residual = case.bank["R1"].detach()
    torch.testing.assert_close(merged["gate_up_proj"], case.gate_up @ residual)
    torch.testing.assert_close(
        merged["down_proj"], residual.T @ case.down @ HadamardTransform(INNER).matrix(torch.float64)
    )
    case.layer.load_state_dict(merged)
    case.layer.release()
    case.layer.refresh()
    with case.mode.set(rotate=True, quantize=True):
        assert all(torch.equal(*pair) for pair in zip(case.layer._quantized_weights(), used, strict=True))
        assert torch.equal(case.layer(*inputs), before)


def test_kept_weights_are_used_again_until_they_are_let_go() -> None:
    case, inputs = make(SPECS["weights"]), make_inputs()
    with case.mode.set(rotate=True, quantize=True), torch.no_grad():
        first = case.layer(*inputs)
        case.layer.keep_quantized_weight(True)
        case.layer(*inputs)
        case.bank.assign({"R1": torch.eye(HIDDEN)})
        assert torch.equal(case.layer(*inputs), first)
        case.layer.keep_quantized_weight(False)
        assert not torch.equal(case.layer(*inputs), first)


def test_each_weight_has_clip_ratios_of_its_own_which_can_be_forgotten() -> None:
    case, inputs = make((QuantSpec(4, clip_search=True), OFF)), make_inputs()
    with case.mode.set(rotate=True, quantize=True), torch.no_grad():
        stale = case.layer(*inputs)
        for weight in (case.layer.gate_up_proj, case.layer.down_proj):
            weight[:, ::2] *= normal(*weight[:, ::2].shape, seed=9)
        kept = case.layer(*inputs)
        case.layer.refresh()
        searched = case.layer(*inputs)
    assert not torch.equal(kept, searched)
    assert not torch.equal(stale, searched)


def test_every_width_that_a_group_size_has_to_divide_is_named() -> None:
    case = make((QuantSpec(4, group_size=4), QuantSpec(4, group_size=12)))
    widths = {(kind, spec.group_size, width) for kind, spec, width in case.layer.quantized_widths()}
    assert widths == {
        ("weights", 4, HIDDEN),
        ("weights", 4, INNER),
        ("activations", 12, HIDDEN),
        ("activations", 12, INNER),
    }
    model = rotated(make_source("mixtral"), quant=QuantConfig(weights=QuantSpec(4, group_size=48)))
    with pytest.raises(ValueError, match=r"quant\.weights\.group_size=48 .* 56;.*layers\.0\.mlp\.experts"):
        model.check_widths()


def test_a_copy_shares_nothing() -> None:
    case = make(SPECS["both"])
    twin = copy.deepcopy(case.layer)
    twin.mode.rotate = True
    assert not case.mode.rotate
    assert twin.residual is not None
    assert twin.residual.bank is not case.bank
    assert twin.weight_quantizers["down_proj"] is not case.layer.weight_quantizers["down_proj"]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe with a dense layer"])
def test_routers_are_rotated_but_not_quantized(name: str) -> None:
    source, token_ids = make_source(name), make_token_ids()
    model = rotated(source, wanted(name, "r1"), QuantConfig(weights=QuantSpec(2), activations=QuantSpec(2)))
    gate: Any = model.network.get_submodule("model.layers.1.mlp.gate")
    hidden = normal(9, source.config.hidden_size, seed=2).float()
    r1 = model.bank["R1"].detach()
    with torch.no_grad():
        plain = gate(hidden)[0]
        with model.mode.set(rotate=True, quantize=True):
            torch.testing.assert_close(gate(hidden @ r1)[0], plain, rtol=1e-4, atol=1e-4)
            assert model.logits(token_ids).isfinite().all()


def test_a_shared_experts_gate_is_not_quantized() -> None:
    quant = QuantConfig(weights=QuantSpec(2), activations=QuantSpec(2))
    model = rotated(make_source("qwen2_moe"), wanted("qwen2_moe", "r1"), quant)
    gate: Any = model.network.get_submodule("model.layers.0.mlp.shared_expert_gate")
    hidden = normal(9, 48, seed=2).float()
    with torch.no_grad():
        plain = gate(hidden)
        with model.mode.set(rotate=True, quantize=True):
            torch.testing.assert_close(gate(hidden @ model.bank["R1"]), plain, rtol=1e-4, atol=1e-4)
