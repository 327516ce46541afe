"""Rotated layers compute their formula, checked in float64, pass gradients to the rotations, and keep their weights."""

import copy
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotexp.models.arch import ValueRows
from rotexp.orthogonal.hadamard import HadamardTransform, random_orthogonal
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.hooks import RotatedInput, RotatedOutput
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.mode import Mode

INPUTS, OUTPUTS = 24, 16
OFF = QuantSpec()
WEIGHTS = QuantSpec(4, symmetric=True)
ACTIVATIONS = QuantSpec(4, symmetric=False)
SPECS = {
    "unquantized": (OFF, OFF),
    "weights": (WEIGHTS, OFF),
    "activations": (OFF, ACTIVATIONS),
    "both": (WEIGHTS, ACTIVATIONS),
}
MODES = list(product((False, True), (False, True)))


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference_quantize(x: Tensor, spec: QuantSpec) -> Tensor:
    """Quantize each row in numpy, in float64."""
    if spec == OFF:
        return x
    values = x.detach().double().numpy()
    if spec.symmetric:
        scale = np.abs(values).max(-1, keepdims=True) / 7
        return torch.from_numpy(np.clip(np.rint(values / scale), -8, 7) * scale)
    low, high = np.minimum(values.min(-1, keepdims=True), 0), np.maximum(values.max(-1, keepdims=True), 0)
    scale = (high - low) / 15
    zero = np.rint(-low / scale)
    return torch.from_numpy((np.clip(np.rint(values / scale) + zero, 0, 15) - zero) * scale)


class Case(NamedTuple):
    """A rotated linear, and dense copies of what it is made of."""

    layer: RotatedLinear
    bank: RotationBank
    mode: Mode
    weight: Tensor
    bias: Tensor | None
    before: Tensor
    after: Tensor


def make(
    *,
    turn: str = "rotation",
    output: bool = True,
    bias: bool = True,
    specs: tuple[QuantSpec, QuantSpec] = (OFF, OFF),
    dtype: torch.dtype = torch.float64,
    bake: bool = True,
) -> Case:
    """Make a linear whose input is turned by nothing, a rotation of 8, or an online Hadamard; the output's is of 4."""
    linear = nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(normal(OUTPUTS, INPUTS, seed=1))
    if bias:
        linear.bias.copy_(normal(OUTPUTS, seed=2))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    bank, mode, generator = RotationBank(), Mode(), torch.Generator().manual_seed(3)
    first, last = (bank.add(f"R_{n}", random_orthogonal(n, generator=generator, dtype=exact)) for n in (8, 4))
    online = HadamardTransform(INPUTS) if turn == "online" else None
    weight, own_bias = linear.weight.double().clone(), linear.bias.double().clone() if bias else None
    layer = RotatedLinear(
        linear,
        mode=mode,
        weight_quantizer=FakeQuantizer(specs[0]),
        input_quantizer=FakeQuantizer(specs[1]),
        input_rotation=first if turn == "rotation" else None,
        output_rotation=last if output else None,
        online=online,
    )
    if bake:
        layer.bake()
    before = {
        "none": torch.eye(INPUTS, dtype=torch.float64),
        "rotation": torch.block_diag(*[bank["R_8"].detach().double()] * (INPUTS // 8)),
        "online": HadamardTransform(INPUTS).matrix(torch.float64),
    }[turn]
    after = torch.block_diag(*[bank["R_4"].detach().double()] * (OUTPUTS // 4))
    return Case(layer, bank, mode, weight, own_bias, before, after if output else torch.eye(OUTPUTS).double())


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("turn", ["none", "rotation", "online"])
def test_forward_equals_the_formula(turn: str, output: bool, bias: bool, specs: tuple[QuantSpec, QuantSpec]) -> None:
    case = make(turn=turn, output=output, bias=bias, specs=specs)
    x = normal(2, 5, INPUTS, seed=4)
    for rotate, quantize in MODES:
        weight_spec, input_spec = specs if quantize else (OFF, OFF)
        before, after = (
            (case.before, case.after) if rotate else (torch.eye(INPUTS).double(), torch.eye(OUTPUTS).double())
        )
        before = case.before if turn == "online" else before  # a transform stays online, also without rotations
        turned = x @ before if turn == "online" else x
        weight = reference_quantize(after.T @ case.weight @ before, weight_spec)
        expected = reference_quantize(turned, input_spec) @ weight.T
        if case.bias is not None:
            expected = expected + case.bias @ after
        with case.mode.set(rotate=rotate, quantize=quantize):
            torch.testing.assert_close(case.layer(x), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("specs", [SPECS["both"], SPECS["activations"]], ids=["both", "activations"])
@pytest.mark.parametrize("turn", ["none", "rotation", "online"])
def test_gradients_are_those_of_the_dense_formula_with_straight_through_rounding(
    turn: str, specs: tuple[QuantSpec, QuantSpec]
) -> None:
    case = make(turn=turn, specs=specs)
    x = normal(2, 5, INPUTS, seed=4).requires_grad_()
    upstream = normal(2, 5, OUTPUTS, seed=5)

    def straight_through(values: Tensor, spec: QuantSpec) -> Tensor:
        return values + (reference_quantize(values, spec) - values).detach()

    inputs, outputs = (torch.block_diag(*[case.bank[n]] * 3) for n in ("R_8", "R_4"))
    outputs = torch.block_diag(outputs, case.bank["R_4"])
    before = inputs if turn == "rotation" else case.before
    weight = straight_through(outputs.T @ case.weight @ before, specs[0])
    expected = straight_through(x @ before if turn == "online" else x, specs[1]) @ weight.T + case.bias @ outputs
    leaves = [x, *case.bank.parameters()]
    reference = torch.autograd.grad(expected, leaves, upstream, materialize_grads=True)
    with case.mode.set(rotate=True, quantize=True):
        result = case.layer(x)
    for mine, theirs in zip(
        torch.autograd.grad(result, leaves, upstream, materialize_grads=True), reference, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_reach_only_the_bank(llama: Any, rotated: Any, token_ids: Tensor) -> None:
    quant = QuantConfig(weights=WEIGHTS, activations=ACTIVATIONS)
    model = rotated(llama(attention_bias=True, mlp_bias=True), quant=quant)
    with model.mode.set(rotate=True, quantize=True):
        model.logits(token_ids).square().sum().backward()
    reached = {name for name, parameter in model.network.named_parameters() if parameter.grad is not None}
    assert reached == {"rotation_bank.R1", "rotation_bank.R2_0", "rotation_bank.R2_1"}
    assert all(matrix.grad.abs().max() > 0 for matrix in model.bank.parameters())


def test_the_weight_keeps_its_name_shape_and_identity() -> None:
    linear = nn.Linear(INPUTS, OUTPUTS)
    kept = linear.weight
    layer = RotatedLinear(
        linear, mode=Mode(), weight_quantizer=FakeQuantizer(OFF), input_quantizer=FakeQuantizer(OFF), online=None
    )
    assert layer.weight is kept
    assert {name: tensor.shape for name, tensor in layer.state_dict().items()} == {
        name: tensor.shape for name, tensor in linear.state_dict().items()
    }


@pytest.mark.parametrize("turn", ["none", "rotation", "online"])
def test_baking_twice_is_baking_once(turn: str) -> None:
    case = make(turn=turn)
    once = case.layer.weight.clone()
    assert torch.equal(once, case.weight) is (turn != "online")
    case.layer.bake()
    assert torch.equal(case.layer.weight, once)


def test_before_baking_the_online_transform_does_not_act() -> None:
    case = make(turn="online", bake=False)
    x = normal(5, INPUTS, seed=4)
    with case.mode.set(rotate=False, quantize=False):
        assert torch.equal(case.layer(x), F.linear(x, case.weight, case.bias))


@pytest.mark.parametrize("turn", ["none", "rotation"])
def test_switched_off_it_is_the_plain_linear_bit_for_bit(turn: str) -> None:
    case = make(turn=turn, specs=SPECS["both"], dtype=torch.float32)
    x = normal(5, INPUTS, seed=4, dtype=torch.float32)
    assert torch.equal(case.layer(x), F.linear(x, case.layer.weight, case.layer.bias))


def test_before_baking_the_original_weight_is_quantized() -> None:
    case = make(turn="online", bias=False, specs=SPECS["weights"], dtype=torch.float32, bake=False)
    with case.mode.set(rotate=False, quantize=True):
        used = case.layer(torch.eye(INPUTS)).T
    torch.testing.assert_close(used, FakeQuantizer(WEIGHTS)(case.weight.float()))


def test_a_kept_weight_is_used_again_until_it_is_let_go() -> None:
    case = make(specs=SPECS["weights"])
    x = normal(5, INPUTS, seed=4)
    with case.mode.set(rotate=True, quantize=True), torch.no_grad():
        first = case.layer(x)
        case.layer.keep_quantized_weight(True)
        kept = case.layer(x)
        case.bank.assign({"R_8": torch.eye(8)})
        assert torch.equal(kept, first)
        assert torch.equal(case.layer(x), first)
        case.layer.keep_quantized_weight(False)
        assert not torch.equal(case.layer(x), first)


def test_one_input_is_not_rotated_twice() -> None:
    handle = RotationBank().add("R_8", torch.eye(8))
    with pytest.raises(AssertionError, match="online or by a rotation, not both"):
        RotatedLinear(
            nn.Linear(INPUTS, OUTPUTS),
            mode=Mode(),
            weight_quantizer=FakeQuantizer(OFF),
            input_quantizer=FakeQuantizer(OFF),
            input_rotation=handle,
            online=HadamardTransform(INPUTS),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_layers_rotate_in_float32_and_answer_in_their_own_dtype(dtype: torch.dtype) -> None:
    case = make(specs=SPECS["unquantized"], dtype=dtype)
    x = normal(5, INPUTS, seed=4).to(dtype)
    with case.mode.set(rotate=True, quantize=False):
        result = case.layer(x)
    assert result.dtype == dtype
    exact = x.double() @ case.before.T @ case.weight.T @ case.after + case.bias @ case.after
    assert (result.double() - exact).abs().max() / exact.abs().max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turn", ["none", "rotation", "online"])
def test_merged_tensors_are_rotated_whatever_the_mode_and_serve_without_rotations(turn: str, bias: bool) -> None:
    case = make(turn=turn, bias=bias, specs=SPECS["both"])
    x = normal(5, INPUTS, seed=4)
    with case.mode.set(rotate=True, quantize=True):
        before = case.layer(x)
    merged = case.layer.merged()
    torch.testing.assert_close(merged["weight"], case.after.T @ case.weight @ case.before)
    assert ("bias" in merged) is bias
    case.layer.load_state_dict(merged)
    case.layer.release()
    with case.mode.set(rotate=True, quantize=True):
        assert torch.equal(case.layer(x), before)


def test_a_hook_rotates_an_embeddings_rows() -> None:
    bank, mode = RotationBank(), Mode()
    matrix = random_orthogonal(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    embedding = nn.Embedding(11, 8, padding_idx=3, dtype=torch.float64).requires_grad_(False)
    table, token_ids = embedding.weight.clone(), torch.tensor([[0, 3, 10], [5, 5, 1]])
    hook = RotatedOutput(embedding, mode=mode, rotation=bank.add("R1", matrix))
    assert torch.equal(embedding(token_ids), table[token_ids])
    mode.rotate = True
    torch.testing.assert_close(embedding(token_ids), table[token_ids] @ matrix)
    torch.testing.assert_close(hook.merged()["weight"], table @ matrix)
    assert list(embedding.state_dict()) == ["weight"]
    embedding(token_ids).sum().backward()
    assert embedding.weight.grad is None
    assert bank["R1"].grad is not None
    hook.release()
    assert torch.equal(embedding(token_ids), table[token_ids])


def test_a_hook_rotates_back_what_a_reader_reads() -> None:
    bank, mode = RotationBank(), Mode()
    matrix = random_orthogonal(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reader = nn.Linear(8, 5, dtype=torch.float64).requires_grad_(False)
    x = normal(3, 8, seed=1)
    plain = F.linear(x, reader.weight, reader.bias)
    hook = RotatedInput(reader, mode=mode, rotation=bank.add("R1", matrix))
    assert torch.equal(reader(x), plain)
    mode.rotate = True
    torch.testing.assert_close(reader(x @ matrix), plain)
    torch.testing.assert_close(hook.merged()["weight"], reader.weight @ matrix)
    reader(x).sum().backward()
    assert bank["R1"].grad is not None
    hook.release()
    assert torch.equal(reader(x), plain)


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("rows", [ValueRows(1, 8, 16), ValueRows(1, 0, 8), ValueRows(2, 4, 8), ValueRows(1, 4, 8)])
def test_an_output_rotation_may_act_on_some_rows(rows: ValueRows, specs: tuple[QuantSpec, QuantSpec]) -> None:
    case = make(specs=specs)
    case.layer.output_rows = rows
    chosen = torch.zeros(rows.num_blocks, OUTPUTS // rows.num_blocks, dtype=torch.bool)
    chosen[:, rows.start : rows.stop] = True
    chosen = chosen.flatten()
    after = torch.eye(OUTPUTS, dtype=torch.float64)
    after[chosen.outer(chosen)] = torch.block_diag(*[case.bank["R_4"].detach()] * (int(chosen.sum()) // 4)).flatten()
    x = normal(2, 5, INPUTS, seed=4)
    for quantize in (False, True):
        weight_spec, input_spec = specs if quantize else (OFF, OFF)
        weight = reference_quantize(after.T @ case.weight @ case.before, weight_spec)
        expected = reference_quantize(x, input_spec) @ weight.T + case.bias @ after
        with case.mode.set(rotate=True, quantize=quantize):
            torch.testing.assert_close(case.layer(x), expected, rtol=1e-11, atol=1e-11)
    merged = case.layer.merged()
    torch.testing.assert_close(merged["weight"], after.T @ case.weight @ case.before)
    torch.testing.assert_close(merged["bias"], case.bias @ after)


def test_a_copied_layer_shares_nothing() -> None:
    case = make()
    twin = copy.deepcopy(case.layer)
    twin.mode.rotate = True
    assert not case.mode.rotate
    assert twin.input_rotation.bank is twin.output_rotation.bank is not case.bank
