"""The hand-derived rotated linear agrees with its naive composition, and keeps no more than it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.models.arch import ValueRows
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.scales import QuantizerScales
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.products import rotated_linear

INPUTS, OUTPUTS = 24, 16
SPECS = {
    "off": QuantSpec(),
    "symmetric": QuantSpec(4),
    "clipped": QuantSpec(4, clip_ratio=0.7),
    "searched": QuantSpec(3, clip_search=True, group_size=8),
    "asymmetric": QuantSpec(4, symmetric=False, clip_ratio=0.8),
    "wide": QuantSpec(8, clip_ratio=0.9),
}
SHAPES: dict[str, tuple[tuple[int, ...] | None, tuple[int, ...] | None, ValueRows | None]] = {
    "none": (None, None, None),
    "input": ((INPUTS, INPUTS), None, None),
    "output": (None, (OUTPUTS, OUTPUTS), None),
    "both": ((INPUTS, INPUTS), (OUTPUTS, OUTPUTS), None),
    "repeated": ((8, 8), (4, 4), None),
    "blocks": ((3, 8, 8), (4, 4, 4), None),
    "rows": ((INPUTS, INPUTS), (2, 2), ValueRows(num_blocks=2, start=2, stop=6)),
}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(matrix: Tensor | None, size: int) -> Tensor | None:
    """Write a rotation out as (size, size), differentiably."""
    if matrix is None:
        return None
    blocks = list(matrix) if matrix.ndim == 3 else [matrix] * (size // matrix.shape[0])
    return torch.block_diag(*blocks)


def naive(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    *,
    rows: ValueRows | None,
    quantizer: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compose dense matrices and the fake quantizer, whose own gradients are tested elsewhere."""
    before, size = dense(before, INPUTS), OUTPUTS if rows is None else rows.num_blocks * (rows.stop - rows.start)
    after = dense(after, size)
    if before is not None:
        weight = weight @ before
    if after is not None and rows is None:
        weight = after.T @ weight
    elif after is not None and rows is not None:
        chosen = torch.arange(OUTPUTS).view(rows.num_blocks, -1)[:, rows.start : rows.stop].flatten()
        weight = weight.index_copy(0, chosen, after.T @ weight[chosen])
    return F.linear(x, quantizer(weight), bias)


def tensors(kind: str, *, bias: bool, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """Draw x, weight, bias, R and L, not even orthogonal, all of which need gradients."""
    before, after, _ = SHAPES[kind]
    drawn = [
        normal(2, 5, INPUTS, seed=0, dtype=dtype),
        normal(OUTPUTS, INPUTS, seed=1, dtype=dtype),
        normal(OUTPUTS, seed=2, dtype=dtype) if bias else None,
        None if before is None else normal(*before, seed=3, dtype=dtype),
        None if after is None else normal(*after, seed=4, dtype=dtype),
    ]
    return [tensor if tensor is None else tensor.requires_grad_() for tensor in drawn]


def gradients(result: Tensor, leaves: list[Tensor | None]) -> list[Tensor]:
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return list(torch.autograd.grad(result, wanted, normal(*result.shape, seed=9).to(result.dtype)))


@contextmanager
def saving() -> Iterator[list[Tensor]]:
    """List what autograd saves inside the block."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


@pytest.mark.parametrize("keep_codes", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_result_and_gradients_equal_the_naive_composition(
    kind: str, bias: bool, spec: QuantSpec, keep_codes: bool
) -> None:
    x, weight, b, before, after = leaves = tensors(kind, bias=bias)
    rows, quantizer = SHAPES[kind][2], FakeQuantizer(spec)
    expected = naive(*leaves, rows=rows, quantizer=quantizer)
    result = rotated_linear(
        x,
        weight=weight,
        bias=b,
        quantizer=quantizer,
        input_rotation=before,
        output_rotation=after,
        output_rows=rows,
        keep_codes=keep_codes,
    )
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)
    for mine, theirs in zip(gradients(result, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("keep_codes", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_unquantized_gradients_are_those_of_finite_differences(kind: str, keep_codes: bool) -> None:
    leaves = tensors(kind, bias=True)

    def function(*given: Tensor | None) -> Tensor:
        x, weight, bias, before, after = given
        return rotated_linear(
            x,
            weight=weight,
            bias=bias,
            quantizer=FakeQuantizer(QuantSpec()),
            input_rotation=before,
            output_rotation=after,
            output_rows=SHAPES[kind][2],
            keep_codes=keep_codes,
        )

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("needed", [(), (0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2), (3, 4)])
def test_gradients_are_formed_only_where_needed(needed: tuple[int, ...]) -> None:
    every = tensors("both", bias=True)
    x, weight, bias, before, after = leaves = [
        tensor.detach().requires_grad_(i in needed) for i, tensor in enumerate(every) if tensor is not None
    ]
    quantizer = FakeQuantizer(QuantSpec(4, clip_ratio=0.8))
    with saving() as saved:
        result = rotated_linear(
            x, weight=weight, bias=bias, quantizer=quantizer, input_rotation=before, output_rotation=after
        )
    assert result.requires_grad is bool(needed)
    assert any(tensor is x for tensor in saved) is bool({1, 3, 4} & {*needed})
    if needed:
        expected = naive(x, weight, bias, before, after, rows=None, quantizer=quantizer)
        for mine, theirs in zip(gradients(result, leaves), gradients(expected, leaves), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("keep_codes", [False, True])
def test_nothing_of_the_weights_size_is_kept_but_its_codes(keep_codes: bool) -> None:
    x, weight, _, before, after = tensors("both", bias=False, dtype=torch.float32)
    with saving() as saved:
        rotated_linear(
            x,
            weight=weight,
            bias=None,
            quantizer=FakeQuantizer(QuantSpec(4, clip_search=True)),
            input_rotation=before,
            output_rotation=after,
            keep_codes=keep_codes,
        )
    new = [tensor for tensor in saved if not any(tensor is given for given in (x, weight, before, after))]
    large = [tensor for tensor in new if tensor.numel() > 3 * OUTPUTS]
    assert [tensor.dtype for tensor in large] == [torch.int8] * keep_codes


def test_in_float32_it_agrees_with_the_composition_to_one_part_in_a_hundred_thousand() -> None:
    leaves = tensors("repeated", bias=True, dtype=torch.float32)
    x, weight, bias, before, after = leaves
    quantizer = FakeQuantizer(QuantSpec(4, clip_search=True))
    bank = RotationBank()
    first, last = bank.add("first", before), bank.add("last", after)
    expected = F.linear(x, quantizer(last.rotate_rows(first.rotate(weight))), bias)
    result = rotated_linear(
        x, weight=weight, bias=bias, quantizer=quantizer, input_rotation=first.matrix, output_rotation=last.matrix
    )
    assert torch.equal(result, expected)
    leaves = [x, weight, bias, *bank.parameters()]
    for mine, theirs in zip(gradients(result, leaves), gradients(expected, leaves), strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_narrow_weights_are_rotated_in_the_rotations_type_and_give_it_their_gradient() -> None:
    x, weight, _, before, after = tensors("both", bias=False, dtype=torch.float32)
    bank, quantizer = RotationBank(), FakeQuantizer(QuantSpec(4, clip_ratio=0.9))
    first, last = bank.add("first", before), bank.add("last", after)
    x, weight = (tensor.detach().bfloat16().requires_grad_() for tensor in (x, weight))
    expected = F.linear(x, quantizer(last.rotate_rows(first.rotate(weight))))
    result = rotated_linear(
        x, weight=weight, bias=None, quantizer=quantizer, input_rotation=first.matrix, output_rotation=last.matrix
    )
    assert torch.equal(result, expected)
    leaves = [x, weight, *bank.parameters()]
    for mine, theirs in zip(gradients(result, leaves), gradients(expected, leaves), strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()


def learned_quantizer(spec: QuantSpec, *, dtype: torch.dtype = torch.float64) -> FakeQuantizer:
    """Return a quantizer of the weight with a ratio of its own for each group, in use."""
    scales, quantizer = QuantizerScales(), FakeQuantizer(spec)
    ratios = 0.4 + 0.6 * torch.rand(OUTPUTS, spec.num_groups(INPUTS), generator=torch.Generator().manual_seed(7))
    quantizer.learned = scales.add("weight", ratios.to(dtype))
    scales.in_use = True
    return quantizer


def learned_step(values: Tensor, ratios: Tensor, spec: QuantSpec) -> Tensor:
    """Write LSQ's equation 1 with its straight-through rounding, and leave the rest to autograd."""
    grouped = values.unflatten(-1, (ratios.shape[-1], -1))
    highest, least = grouped.detach().amax(-1, keepdim=True), grouped.detach().amin(-1, keepdim=True)
    if spec.symmetric:
        lowest, limit = torch.tensor(-(2.0 ** (spec.bits - 1))), torch.tensor(2.0 ** (spec.bits - 1) - 1)
        scale = ratios.unsqueeze(-1) * torch.maximum(highest, -least) / limit
    else:
        span = highest.clamp(min=0) - least.clamp(max=0)
        zero = (-least.clamp(max=0) * (2**spec.bits - 1) / span).round()
        lowest, limit = -zero, 2**spec.bits - 1 - zero
        scale = ratios.unsqueeze(-1) * span / (2**spec.bits - 1)
    codes = grouped / scale
    codes = codes + (codes.round() - codes).detach()
    bounded = torch.where(codes < lowest, lowest, torch.where(codes > limit, limit, codes))
    return (bounded * scale).flatten(-2)


@pytest.mark.parametrize(
    "spec",
    [QuantSpec(4), QuantSpec(3, clip_search=True, group_size=8), QuantSpec(4, symmetric=False, group_size=4)],
    ids=["rows", "groups", "asymmetric"],
)
@pytest.mark.parametrize("kind", SHAPES)
def test_learned_ratios_get_the_gradient_of_a_learned_step(kind: str, spec: QuantSpec) -> None:
    x, weight, b, before, after = leaves = tensors(kind, bias=True)
    rows, quantizer = SHAPES[kind][2], learned_quantizer(spec)
    assert quantizer.learned is not None
    (ratios,) = quantizer.learned.scales.parameters()

    def oracle(values: Tensor) -> Tensor:
        return learned_step(values, ratios, spec)

    result = rotated_linear(
        x,
        weight=weight,
        bias=b,
        quantizer=quantizer,
        input_rotation=before,
        output_rotation=after,
        output_rows=rows,
    )
    expected = naive(*leaves, rows=rows, quantizer=oracle)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)
    wanted = [ratios, *leaves]
    for mine, theirs in zip(gradients(result, wanted), gradients(expected, wanted), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_with_learned_ratios_nothing_of_the_weights_size_is_kept() -> None:
    x, weight, _, before, after = tensors("both", bias=False, dtype=torch.float32)
    quantizer = learned_quantizer(QuantSpec(4), dtype=torch.float32)
    with saving() as saved:
        rotated_linear(x, weight=weight, bias=None, quantizer=quantizer, input_rotation=before, output_rotation=after)
    new = [tensor for tensor in saved if not any(tensor is given for given in (x, weight, before, after))]
    assert max(tensor.numel() for tensor in new) == OUTPUTS
