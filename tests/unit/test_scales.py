"""Learned scales: owned once, in use from a start at the ratios of before, followed by every use of the quantizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.scales import LARGEST, LEAST, QuantizerScales
from rotexp.quant.spec import QuantSpec

SEARCHED = QuantSpec(3, group_size=8, clip_search=True)
FIXED = QuantSpec(4, clip_ratio=0.8)
PLAIN = QuantSpec(8, symmetric=False)


def weight(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (6, 24)), generator=torch.Generator().manual_seed(seed))


def learned(spec: QuantSpec, *shape: int) -> tuple[FakeQuantizer, QuantizerScales, nn.Parameter]:
    """Return a quantizer of weight(*shape), and what owns its ratios, not in use yet."""
    quantizer, scales = FakeQuantizer(spec), QuantizerScales()
    *outputs, width = shape or (6, 24)
    quantizer.learned = scales.add("layers.0.down", torch.ones(*outputs, spec.num_groups(width)))
    (ratios,) = scales.parameters()
    return quantizer, scales, ratios


def test_a_parameter_is_named_after_its_weight() -> None:
    _, scales, ratios = learned(SEARCHED)
    assert dict(scales.named_parameters()) == {"layers-0-down": ratios}
    assert ratios.shape == (6, 3)
    assert ratios.dtype == torch.float32
    assert ratios.requires_grad


@pytest.mark.parametrize("spec", [SEARCHED, FIXED, PLAIN])
def test_until_they_are_in_use_nothing_changes(spec: QuantSpec) -> None:
    quantizer, _, ratios = learned(spec)
    nn.init.constant_(ratios, 0.3)
    x = weight()
    assert quantizer.clips is spec.clips
    assert torch.equal(quantizer(x), FakeQuantizer(spec)(x))
    assert quantizer.encode(x)[1].codes.dtype == FakeQuantizer(spec).encode(x)[1].codes.dtype


@pytest.mark.parametrize("shape", [(6, 24), (3, 6, 24)])
@pytest.mark.parametrize("spec", [SEARCHED, FIXED, PLAIN])
def test_they_start_where_the_spec_has_them_and_change_no_value(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    quantizer, scales, ratios = learned(spec, *shape)
    x = weight(*shape)
    before = quantizer(x)
    quantizer.refresh()
    quantizer.start(x)
    scales.in_use = True
    assert (len(ratios.unique()) > 1) is spec.clip_search
    assert torch.equal(quantizer(x), before)
    quantizer.refresh()
    assert torch.equal(quantizer(x), before)


@pytest.mark.parametrize("shape", [(6, 24), (3, 6, 24)])
@pytest.mark.parametrize("spec", [SEARCHED, FIXED, PLAIN])
def test_every_form_of_a_tensor_follows_the_ratios(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    quantizer, scales, ratios = learned(spec, *shape)
    scales.in_use = True
    nn.init.constant_(ratios, 0.5)
    x = weight(*shape)
    expected = FakeQuantizer(QuantSpec(spec.bits, spec.symmetric, spec.group_size, clip_ratio=0.5))(x)
    values, encoded = quantizer.encode(x)
    assert torch.equal(quantizer(x), expected)
    assert torch.equal(values, expected)
    assert torch.equal(encoded.decode()[0], expected)
    assert torch.equal(quantizer.quantize(x).dequantize(), expected)


def test_the_gradient_is_that_of_equation_3() -> None:
    quantizer, scales, ratios = learned(QuantSpec(3), 1, 4)
    scales.in_use = True
    nn.init.constant_(ratios, 0.5)
    x = torch.tensor([[3.0, 1.0, -0.7, -6.0]], requires_grad=True)
    quantizer(x).backward(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))
    step = 0.5 * 6 / 3  # codes 3, 1, -1 and, clipped, -4 for -6
    slopes = [3 - 3 / step, 1 - 1 / step, -1 + 0.7 / step, -4.0]
    by_step = sum(factor * slope for factor, slope in zip((1, 10, 100, 1000), slopes, strict=True))
    assert ratios.grad is not None
    assert ratios.grad.item() == pytest.approx(by_step * step / 0.5)
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 10.0, 100.0, 0.0]]


@pytest.mark.parametrize(("given", "acting"), [(-1.0, LEAST), (5.0, LARGEST), (1.3, 1.3)])
def test_ratios_act_within_bounds(given: float, acting: float) -> None:
    quantizer, scales, ratios = learned(FIXED)
    scales.in_use = True
    nn.init.constant_(ratios, given)
    ratio = torch.full((6, 1), acting)
    absolute = weight().abs().amax(-1, keepdim=True)
    assert torch.allclose(quantizer.quantize(weight()).scale, ratio * absolute / 7)


def test_a_group_of_zeros_stays_zero_and_has_no_gradient() -> None:
    quantizer, scales, ratios = learned(FIXED, 2, 8)
    scales.in_use = True
    values = quantizer(torch.stack([torch.zeros(8), torch.arange(8.0).exp()]))
    values.sum().backward()
    assert values[0].tolist() == [0.0] * 8
    assert ratios.grad is not None
    assert ratios.grad[0].item() == 0.0
    assert ratios.grad[1].item() != 0.0


def test_a_copied_model_has_scales_of_its_own() -> None:
    quantizer, scales, ratios = learned(FIXED)
    scales.in_use = True
    twin, twins = copy.deepcopy((quantizer, scales))
    nn.init.constant_(next(iter(twins.parameters())), 0.5)
    assert ratios.unique().tolist() == [1.0]
    assert twin.ratios is not None
    assert quantizer.ratios is not None
    assert twin.ratios.unique().tolist() == [0.5]
    assert quantizer.ratios.unique().tolist() == [1.0]
