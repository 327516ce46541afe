"""NF4 and MXFP4 of `examples/` agree with their publications, and are used as a configuration's `_target_` says."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, from_config
from scipy.stats import norm
from torch import Tensor

from rotexp.metrics.quantizer_memory import _codes
from rotexp.models.arch import find_spec
from rotexp.quant.encoded import decode_into
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.options import QuantConfig
from rotexp.quant.quantizer import Quantizer
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.merge import prepare
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place
from rotexp.rotation.quantizers import fake_quantizer
from rotexp.rotation.survey import _describe
from rotexp.rotation.trainable import train_also
from rotexp.testing import check_quantizer
from rotexp.training.options import Trainable

FORMATS = Path(__file__).parents[2] / "examples" / "plugins" / "formats"
sys.path.insert(0, str(FORMATS))

from mxfp4 import MAGNITUDES, MXFP4  # noqa: E402
from nf4 import LEVELS, NF4  # noqa: E402


class Unfinished(NF4):
    """Raises an error of a kind that no message of rotexp's expects."""

    def __init__(self) -> None:
        raise KeyError("table")


NF4_SPEC = QuantSpec(_target_="nf4.NF4", group_size=8)
MXFP4_SPEC = QuantSpec(_target_="mxfp4.MXFP4", group_size=32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def groups_of(width: int) -> Tensor:
    """Rows of many magnitudes, some with outliers, with values at and beside the borders between codes."""
    x = normal(64, width) * torch.logspace(-20, 20, 64)[:, None]
    x[::7, 3] *= 30
    x[5] = 0.0
    return x


def test_nf4_has_the_quantiles_of_the_paper() -> None:
    """Section 3 and the authors' construction: 8 and 9 even steps of probability on the two sides, sharing zero."""
    offset = 1 - (1 / 32 + 1 / 30) / 2
    positive = norm.ppf(np.linspace(offset, 0.5, 9))
    negative = -norm.ppf(np.linspace(offset, 0.5, 8))
    levels = np.sort(np.concatenate([positive[:-1], [0.0], negative[:-1]]))
    np.testing.assert_allclose(LEVELS, levels / np.abs(levels).max(), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nf4_takes_the_nearest_value(dtype: torch.dtype) -> None:
    x = groups_of(64).to(dtype)
    found = FakeQuantizer(NF4_SPEC, NF4())(x).double().numpy().reshape(64, 8, 8)
    grouped = x.double().numpy().reshape(64, 8, 8)
    scale = np.abs(grouped).max(-1, keepdims=True)
    candidates = scale[..., None] * np.array(LEVELS)
    least = np.abs(candidates - grouped[..., None]).min(-1)
    np.testing.assert_allclose(np.abs(found - grouped), least, atol=1e-6 * scale.max(), rtol=1e-5)
    for row in range(64):
        np.testing.assert_allclose(np.abs(found - grouped)[row], least[row], atol=3e-7 * scale[row].max())


def mxfp4_in_float64(x: Tensor) -> np.ndarray[Any, Any]:
    """Section 6.3 by brute force over the 15 numbers: nearest, ties to the even mantissa, beyond 6 the largest."""
    grouped = x.double().numpy().reshape(len(x), -1, 32)
    largest = np.abs(grouped).max(-1, keepdims=True)
    exponent = np.array([[[int(v).bit_length() - 1 if v >= 1 else _floor_log2(v)] for (v,) in row] for row in largest])
    scale = 2.0 ** np.clip(exponent - 2, -127, 127)
    magnitude = np.abs(grouped / scale)
    distance = np.abs(magnitude[..., None] - np.array(MAGNITUDES))
    even = np.array([0, 1, 0, 1, 0, 1, 0, 1]) * 1e-12
    nearest = np.array(MAGNITUDES)[(distance + even).argmin(-1)]
    values: np.ndarray[Any, Any] = (np.sign(grouped) * nearest * scale).reshape(x.shape)
    return values


def _floor_log2(value: float) -> int:
    """Count halvings."""
    exponent = 0
    while value and value < 1:
        value, exponent = value * 2, exponent - 1
    return exponent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mxfp4_agrees_with_brute_force(dtype: torch.dtype) -> None:
    x = groups_of(64).to(dtype)
    x[6, :32] = torch.arange(32, dtype=dtype) / 4 - 0.25  # scale 1, every tie and what saturates
    x[7, 0] = 2.0**20 - 0.0625  # its logarithm rounds to 20 in float32
    x[8:24, :32] = normal(16, 32, seed=7).to(dtype) * 2.0 ** -torch.arange(116, 132)[:, None].to(dtype)  # to 2⁻¹²⁷
    found = FakeQuantizer(MXFP4_SPEC, MXFP4())(x)
    assert (found[8:24] != 0).any(-1).all()
    np.testing.assert_array_equal(found.double().numpy(), mxfp4_in_float64(x))
    assert found[6, :32].max() == 6.0


def test_mxfp4_passes_no_gradient_where_it_saturates() -> None:
    x = torch.cat([torch.tensor([6.9, -6.9, 7.1, -7.1]), torch.ones(28)])[None].requires_grad_()
    FakeQuantizer(MXFP4_SPEC, MXFP4())(x).sum().backward()
    assert x.grad is not None
    assert x.grad[0, :5].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("format_", [NF4, MXFP4])
def test_they_keep_the_contract(format_: type[Quantizer]) -> None:
    check_quantizer(format_)


def test_adding_one_costs_a_file_and_a_yaml() -> None:
    files = [*FORMATS.rglob("*.py"), *FORMATS.rglob("*.yaml")]
    own = sorted(file.relative_to(FORMATS).as_posix() for file in files)
    assert own == ["conf/quant/mxfp4.yaml", "conf/quant/nf4.yaml", "mxfp4.py", "nf4.py"]


def test_searched_ratios_of_nf4_lessen_the_error_and_have_the_least_of_all() -> None:
    x = normal(32, 64, seed=3)
    searched = QuantSpec(_target_="nf4.NF4", group_size=64, clip_search=True)
    errors = [
        (FakeQuantizer(QuantSpec(_target_="nf4.NF4", group_size=64, clip_ratio=ratio), NF4())(x) - x).square().sum(-1)
        for ratio in (1.0, 0.975, 0.95, 0.925, 0.9, 0.8)
    ]
    found = (FakeQuantizer(searched, NF4())(x) - x).square().sum(-1)
    assert (found <= torch.stack(errors).amin(0) * (1 + 1e-5)).all()
    assert (found < 0.999 * errors[0]).any()


def test_learned_ratios_of_nf4_get_the_slope_of_the_loss() -> None:
    """Straight through the rounding, the slope by a ratio is that of value = level · scale with x − rounding fixed."""
    from rotexp.quant.scales import QuantizerScales

    x = normal(4, 16, seed=1).double()
    quantizer, scales = FakeQuantizer(NF4_SPEC, NF4()), QuantizerScales()
    quantizer.learned = scales.add("w", torch.full((4, 2), 0.9, dtype=torch.float64))
    scales.in_use = True
    upstream = normal(4, 16, seed=2).double()
    quantizer(x).backward(upstream)
    (ratios,) = scales.parameters()
    largest = x.view(4, 2, 8).abs().amax(-1, keepdim=True)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    scaled = x.view(4, 2, 8) / (0.9 * largest)
    level = levels[(scaled[..., None] - levels).abs().argmin(-1)]
    by_scale = torch.where(scaled.abs() > 1, level, level - scaled)
    expected = (by_scale * largest * upstream.view(4, 2, 8)).sum(-1)
    assert ratios.grad is not None
    torch.testing.assert_close(ratios.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "quantizer",
    [
        FakeQuantizer(QuantSpec(_target_="nf4.NF4", group_size=8, clip_ratio=0.8), NF4()),
        FakeQuantizer(MXFP4_SPEC, MXFP4()),
        FakeQuantizer(QuantSpec(4, symmetric=False, group_size=8, clip_ratio=0.8)),
        FakeQuantizer(QuantSpec(8, symmetric=False)),
    ],
    ids=["nf4", "mxfp4", "4 bits", "8 bits"],
)
def test_codes_within_the_range_and_scales_are_all_that_values_need(
    quantizer: FakeQuantizer, dtype: torch.dtype
) -> None:
    x = groups_of(64).to(dtype)
    values, encoded = quantizer.encode(x)
    codes, scale = encoded.bounded()
    lowest, highest = quantizer.quantizer.code_range
    assert lowest <= int(codes.min()) <= int(codes.max()) <= highest
    gathered = torch.full_like(x, torch.nan)
    decode_into(gathered, codes, scale, quantizer=quantizer.quantizer)
    assert torch.equal(gathered, values)
    assert torch.equal(quantizer(x), values)


def test_experts_take_a_format_as_linears_do() -> None:
    network = from_config(FAMILIES["mixtral"].config(tie_word_embeddings=False))
    quant = QuantConfig("nf4", NF4_SPEC, NF4_SPEC)
    model = place(network, find_spec(network), RotationConfig(r1=True, r2=True), quant, seed=0)
    prepare(model)
    (experts, *_) = [module for module in model.rotated_modules if isinstance(module, RotatedExperts)]
    assert isinstance(experts.weight_quantizers["gate_up_proj"].quantizer, NF4)
    assert isinstance(experts.input_quantizer.quantizer, NF4)
    with model.mode.set(rotate=True, quantize=True):
        model.logits(torch.arange(12)[None]).sum().backward()
    assert all(matrix.grad is not None and matrix.grad.any() for _, matrix in model.bank.items())


def quantized(**specs: QuantSpec) -> Any:
    network = from_config(FAMILIES["llama"].config(tie_word_embeddings=False))
    return place(network, find_spec(network), RotationConfig(r1=True, r2=True), QuantConfig(**specs), seed=0)


def test_a_target_builds_the_quantizers_of_weights_activations_and_keys() -> None:
    model = quantized(weights=NF4_SPEC, activations=NF4_SPEC, kv=QuantSpec(_target_="nf4.NF4", group_size=4))
    linear = model.network.model.layers[0].mlp.up_proj
    assert isinstance(linear.weight_quantizer.quantizer, NF4)
    assert isinstance(linear.input_quantizer.quantizer, NF4)
    assert isinstance(model.network.model.layers[0].self_attn.cache.quantizer.quantizer, NF4)
    model.check_widths()
    prepare(model)
    tokens = torch.arange(12)[None]
    with torch.no_grad(), model.mode.set(rotate=True, quantize=True):
        values = model.logits(tokens)
    with torch.no_grad(), model.mode.set(rotate=True, quantize=False):
        assert 1e-3 < (model.logits(tokens) - values).abs().mean() < 1.0


def test_tables_call_a_format_by_its_name() -> None:
    model = quantized(weights=NF4_SPEC)
    report = _describe("up_proj", (56, 48), "reads", model.network.model.layers[0].mlp.up_proj)
    assert (report.weights, report.activations) == ("NF4", "16")
    assert (NF4_SPEC.setting, QuantSpec(4).setting) == ("_target_=nf4.NF4", "bits=4")


def test_a_format_alone_switches_quantization_on() -> None:
    assert NF4_SPEC.enabled
    assert not NF4_SPEC.clips
    assert QuantConfig("nf4", weights=NF4_SPEC).enabled


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"bits": 4}, "w.bits=4: has no effect with w._target_=nf4.NF4; leave it out"),
        ({"symmetric": False}, "w.symmetric=false: has no effect with w._target_=nf4.NF4; leave it out"),
        ({"clip_ratio": 0.9, "clip_search": True}, "w.clip_ratio=0.9 has no effect with w.clip_search=true"),
        ({"group_size": 0}, "w.group_size=0 is below 1"),
    ],
)
def test_options_of_integers_are_refused_beside_a_format(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QuantSpec(_target_="nf4.NF4", **spec).validate("w")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "w.group_size=null: must be 32, the only one of MXFP4; set 32"),
        ({"group_size": 64}, "w.group_size=64: must be 32, the only one of MXFP4; set 32"),
        ({"group_size": 32, "clip_ratio": 0.9}, "w.clip_ratio=0.9: has no effect, since MXFP4 takes no clip ratios"),
        ({"group_size": 32, "clip_search": True}, "w.clip_search=true: has no effect, since MXFP4 takes no clip rat"),
        (
            {"group_size": 32, "options": {"bits": 4}},
            "mxfp4.MXFP4: cannot be made of its options (TypeError: MXFP4() takes no arg",
        ),
        ({"_target_": "types.MappingProxyType", "options": {"mapping": 3}}, "cannot be made of its options ("),
        ({"_target_": "test_own_formats.Unfinished"}, "w._target_=test_own_formats.Unfinished: cannot be made of its"),
        ({"_target_": "pathlib.PurePath"}, "w._target_=pathlib.PurePath: has no code_range, which rotexp.quant."),
    ],
)
def test_what_a_format_cannot_do_is_refused_in_one_line(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        fake_quantizer(QuantSpec(**{"_target_": "mxfp4.MXFP4", **spec}), key="w")
    assert "\n" not in str(refusal.value)


def test_what_is_counted_for_codes_is_what_they_take() -> None:
    linear = quantized(weights=NF4_SPEC).network.model.layers[0].mlp.up_proj
    kept = linear.weight_quantizer.encode(linear.weight)[1]
    assert _codes(linear) == sum(tensor.numel() * tensor.element_size() for tensor in kept.tensors)


def test_a_group_size_that_does_not_divide_is_refused_as_of_integers() -> None:
    with pytest.raises(ValueError, match=r"quant.weights.group_size=32 does not divide the width 48; set 24 or 48"):
        quantized(weights=MXFP4_SPEC).check_widths()


def test_scales_that_cannot_be_learned_are_refused() -> None:
    model = quantized(weights=MXFP4_SPEC)
    with pytest.raises(ValueError, match=r"train.params=rotations_and_scales: quant.weights._target_=mxfp4.MXFP4 has"):
        train_also(model, Trainable.rotations_and_scales)


def test_a_format_has_no_integer_form_but_codes() -> None:
    quantizer = FakeQuantizer(NF4_SPEC, NF4())
    with pytest.raises(ValueError, match=r"_target_=nf4\.NF4 has no integer form"):
        quantizer.quantize(normal(2, 8))
    codes, scale = quantizer.encode(normal(2, 8))[1].bounded()
    assert (codes.dtype, codes.shape, scale.shape) == (torch.int8, (2, 8), (2, 1))
    assert int(codes.min()) >= 0
    assert torch.equal(copy.deepcopy(quantizer)(normal(2, 8)), quantizer(normal(2, 8)))
