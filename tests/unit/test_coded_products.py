"""The rotated linear on integer units agrees with float64, errs no more than its twin in values, and keeps codes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from test_products import SHAPES, dense, saving
from torch import Tensor, nn

from rotexp.quant.coded_input import code_input
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.integer_products import Coded, can_multiply, has_integer_units
from rotexp.quant.options import Products, QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.coded_products import coded_linear, coded_values_linear
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.mode import Mode
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.products import rotate_weight, rotated_linear
from rotexp.rotation.shared_input import SharedInput

pytestmark = pytest.mark.skipif(not has_integer_units(), reason="this CPU has no AVX-512 VNNI")
INPUTS, OUTPUTS = 24, 16
WEIGHTS = {
    "plain": QuantSpec(4),
    "searched": QuantSpec(3, clip_search=True),
    "asymmetric": QuantSpec(4, symmetric=False, clip_ratio=0.8),
    "wide": QuantSpec(8, clip_ratio=0.9),
}
ACTIVATIONS = {
    "asymmetric": QuantSpec(4, symmetric=False),
    "clipped": QuantSpec(4, symmetric=False, clip_ratio=0.7),
    "wide": QuantSpec(8),
}
Leaves = list[Tensor | None]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(*shape: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(*shape, seed=seed).double())[0].float().contiguous()


def leaves(kind: str, *, bias: bool, inputs: int = INPUTS, outputs: int = OUTPUTS, tokens: int = 5) -> Leaves:
    """Draw x, weight, bias, R and L, all of which need gradients."""
    before, after, _ = SHAPES[kind]
    drawn = [
        normal(2, tokens, inputs, seed=0),
        normal(outputs, inputs, seed=1),
        normal(outputs, seed=2) if bias else None,
        None if before is None else rotation(*before, seed=3),
        None if after is None else rotation(*after, seed=4),
    ]
    return [tensor if tensor is None else tensor.requires_grad_() for tensor in drawn]


def run(tensors: Leaves, kind: str, specs: tuple[QuantSpec, QuantSpec], *, coded: bool, keep: bool = True) -> Tensor:
    x, weight, bias, before, after = tensors
    quantizer, of_x = (FakeQuantizer(spec) for spec in specs)
    linear, read = (coded_linear, code_input) if coded else (rotated_linear, lambda x, quantizer: quantizer(x))
    options = {"input_rotation": before, "output_rotation": after, "output_rows": SHAPES[kind][2], "keep_codes": keep}
    result: Tensor = linear(read(x, of_x), weight=weight, bias=bias, quantizer=quantizer, **options)  # type: ignore[operator]
    return result


def oracle(tensors: Leaves, kind: str, specs: tuple[QuantSpec, QuantSpec], upstream: Tensor) -> list[Tensor]:
    """Return the result and all gradients in float64, for the codes that float32 finds."""
    x, weight, bias, before, after = (None if t is None else t.detach() for t in tensors)
    rows = SHAPES[kind][2]
    quantizer, of_x = (FakeQuantizer(spec) for spec in specs)
    rotated = rotate_weight(weight, before=before, after=after, rows=rows)
    (q_weight, weight_passes), (q_x, x_passes) = (q.encode(t)[1].decode() for q, t in ((quantizer, rotated), (of_x, x)))
    values, used, gradient = (t.double() for t in (q_x, q_weight, upstream))
    for_x = (gradient @ used) * (1 if x_passes is None else x_passes)
    for_rotated = torch.einsum("bto,bti->oi", gradient, values) * (1 if weight_passes is None else weight_passes)
    exact = [None if t is None else t.double().requires_grad_() for t in (weight, before, after)]
    composed = exact[0] if before is None else exact[0] @ dense(exact[1], weight.shape[1])
    if after is not None and rows is None:
        composed = dense(exact[2], weight.shape[0]).T @ composed
    elif after is not None:
        chosen = torch.arange(weight.shape[0]).view(rows.num_blocks, -1)[:, rows.start : rows.stop].flatten()
        composed = composed.index_copy(0, chosen, dense(exact[2], len(chosen)).T @ composed[chosen])
    composed.backward(for_rotated)
    y = values @ used.T + (0 if bias is None else bias.double())
    of_bias = [] if bias is None else [gradient.sum((0, 1))]
    return [y, for_x, exact[0].grad, *of_bias, *(t.grad for t in exact[1:] if t is not None)]


def found(tensors: Leaves, result: Tensor, upstream: Tensor) -> list[Tensor]:
    wanted = [leaf for leaf in tensors if leaf is not None]
    return [result.detach(), *torch.autograd.grad(result, wanted, upstream)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_result_and_gradients_are_those_of_float64(
    kind: str, bias: bool, weights: str, activations: str, keep: bool
) -> None:
    tensors, specs = leaves(kind, bias=bias), (WEIGHTS[weights], ACTIVATIONS[activations])
    upstream = normal(2, 5, OUTPUTS, seed=9)
    mine = found(tensors, run(tensors, kind, specs, coded=True, keep=keep), upstream)
    for ours, exact in zip(mine, oracle(tensors, kind, specs, upstream), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())


@pytest.mark.parametrize(("inputs", "outputs", "order"), [(576, 192, 576), (1536, 576, 64), (64, 1536, 64)])
def test_at_sizes_of_models_it_errs_no_more_than_in_floating_point(
    inputs: int, outputs: int, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "model", ((order, order), None, None))
    tensors = leaves("model", bias=False, inputs=inputs, outputs=outputs, tokens=100)
    specs, upstream = (WEIGHTS["searched"], ACTIVATIONS["asymmetric"]), normal(2, 100, outputs, seed=9)
    exact = oracle(tensors, "model", specs, upstream)
    errors = []
    for coded in (True, False):
        results = found(tensors, run(tensors, "model", specs, coded=coded), upstream)
        errors.append([torch.dist(mine.double(), true).item() for mine, true in zip(results, exact, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 1.05 * theirs


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_kept_of_activations_and_quantized_weight_is_int8(keep: bool) -> None:
    tensors = leaves("both", bias=True)
    x, weight, *_ = tensors
    specs = (WEIGHTS["searched"], ACTIVATIONS["asymmetric"])
    with saving() as saved:
        run(tensors, "both", specs, coded=True, keep=keep)
    large = [t.dtype for t in saved if t.numel() >= min(x.numel(), OUTPUTS * INPUTS) and t is not weight]
    others = [dtype for dtype in large if dtype != torch.int8]
    assert large.count(torch.int8) == 1 + keep
    assert others in ([], [torch.float32] * 2), "the rotations alone are as large as the weight"


def test_a_weight_in_values_is_multiplied_bit_for_bit_as_its_codes() -> None:
    x, weight, bias, *_ = tensors = leaves("none", bias=True)
    quantizer, of_x = FakeQuantizer(WEIGHTS["plain"]), FakeQuantizer(ACTIVATIONS["clipped"])
    values, encoded = quantizer.encode(weight)
    upstream = normal(2, 5, OUTPUTS, seed=9)
    whole = found(tensors, run(tensors, "none", (WEIGHTS["plain"], ACTIVATIONS["clipped"]), coded=True), upstream)
    values.requires_grad_()
    scale = encoded.grid.scale.squeeze(-1)
    y = coded_values_linear(code_input(x, of_x), weight=values, scale=scale, bias=bias)
    for ours, theirs in zip(found([x, values, bias], y, upstream), whole, strict=True):
        assert torch.equal(ours, theirs)


def layer(
    *,
    integer_products: bool = True,
    dtype: torch.dtype = torch.float32,
    shared: SharedInput | None = None,
    weights: QuantSpec = WEIGHTS["searched"],
    activations: QuantSpec = ACTIVATIONS["asymmetric"],
) -> RotatedLinear:
    linear = nn.Linear(INPUTS, OUTPUTS, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(normal(OUTPUTS, INPUTS, seed=1))
    linear.bias.copy_(normal(OUTPUTS, seed=2))
    bank = RotationBank()
    return RotatedLinear(
        linear,
        mode=Mode(rotate=True, quantize=True),
        weight_quantizer=FakeQuantizer(weights),
        input_quantizer=FakeQuantizer(activations),
        input_rotation=bank.add("R", rotation(INPUTS, INPUTS, seed=3)),
        integer_products=integer_products,
        shared=shared,
    )


def answers(linear: RotatedLinear, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result in training and in evaluation with kept weights, and the rotation's gradient."""
    trained = linear(x)
    (gradient,) = torch.autograd.grad(trained.float().square().sum(), [linear.input_rotation.matrix])
    linear.keep_quantized_weight(True)
    with torch.no_grad():
        linear(x)
        kept = linear(x)
    return trained.detach(), kept, gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_a_layer_computes_the_same_with_and_without_integers(dtype: torch.dtype, tolerance: float) -> None:
    x = normal(2, 5, INPUTS, seed=0).to(dtype)
    integer, floating = layer(dtype=dtype), layer(dtype=dtype, integer_products=False)
    assert integer.multiplies_integers(x)
    assert not floating.multiplies_integers(x)
    for ours, theirs in zip(answers(integer, x), answers(floating, x), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 8), (8, 1)])
def test_a_weight_of_one_row_or_column_is_multiplied_as_values(inputs: int, outputs: int) -> None:
    assert not can_multiply(torch.zeros(3, inputs), outputs=outputs)


def test_an_evaluated_weight_is_kept_as_codes_and_let_go() -> None:
    linear, x = layer(), normal(2, 5, INPUTS, seed=0)
    linear.keep_quantized_weight(True)
    with torch.no_grad():
        first = linear(x)
        assert isinstance(linear._kept, Coded)
        assert linear._kept.codes.dtype == torch.int8
        linear.input_rotation.matrix.copy_(torch.eye(INPUTS))
        assert torch.equal(linear(x), first)
        linear.keep_quantized_weight(False)
        assert not torch.equal(linear(x), first)


@pytest.mark.parametrize(
    "specs",
    [
        {"weights": QuantSpec(4, group_size=8)},
        {"activations": QuantSpec(4, symmetric=False, group_size=8)},
        {"activations": QuantSpec(8, symmetric=False)},
        {"activations": QuantSpec()},
        {"dtype": torch.float64},
    ],
)
def test_what_has_no_int8_form_is_multiplied_as_values(specs: dict[str, QuantSpec]) -> None:
    linear = layer(**specs)
    assert not linear.multiplies_integers(normal(2, 5, INPUTS, seed=0).to(linear.weight.dtype))


def test_readers_of_one_input_quantize_it_once_and_add_their_gradients() -> None:
    shared = SharedInput()
    linears, x = [layer(shared=shared) for _ in range(3)], normal(2, 5, INPUTS, seed=0).requires_grad_()
    encoded = []
    for linear in linears:
        encode: Callable[..., object] = linear.input_quantizer.encode_codes
        linear.input_quantizer.encode_codes = lambda x, encode=encode: encoded.append(1) or encode(x)  # type: ignore
    (together,) = torch.autograd.grad(sum(linear(x).square().sum() for linear in linears), [x])
    assert len(encoded) == 1
    (alone,) = torch.autograd.grad(layer()(x).square().sum(), [x])
    torch.testing.assert_close(together, 3 * alone)


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["x", "weight", "upstream"])
def test_what_is_not_finite_shows_in_results_and_gradients(where: str, spoiled: float) -> None:
    tensors = leaves("both", bias=False)
    upstream = normal(2, 5, OUTPUTS, seed=9)
    with torch.no_grad():
        {"x": tensors[0], "weight": tensors[1], "upstream": upstream}[where].view(-1)[3] = spoiled
    specs = (WEIGHTS["plain"], ACTIVATIONS["asymmetric"])
    y, for_x, for_weight, *of_rotations = found(tensors, run(tensors, "both", specs, coded=True), upstream)
    assert y.isfinite().all().item() is (where == "upstream")
    assert for_x.isfinite().all().item() is (where == "x")
    assert for_weight.isfinite().all().item() is (where == "weight")
    assert not any(gradient.isfinite().all() for gradient in of_rotations)


def test_a_layer_that_has_multiplied_integers_can_be_copied() -> None:
    linear, x = layer(), normal(2, 5, INPUTS, seed=0)
    expected = linear(x)
    assert torch.equal(pickle.loads(pickle.dumps(linear))(x), expected)


@pytest.mark.parametrize("products", Products)
def test_the_key_says_whether_a_models_layers_multiply_integers(
    products: Products, llama: Callable[..., nn.Module], rotated: Callable[..., RotatedModel]
) -> None:
    quant = QuantConfig(weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False), products=products)
    model = rotated(llama().float(), quant=quant)
    linears = [module for module in model.rotated_modules if module.weight_quantizer.spec.enabled]
    assert len(linears) == 14
    x = {width: torch.zeros(1, 2, width) for width in {linear.weight.shape[1] for linear in linears}}
    taken = {linear.multiplies_integers(x[linear.weight.shape[1]]) for linear in linears}
    assert taken == {products is Products.auto}
