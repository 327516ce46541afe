"""Fake quantization agrees with integer arithmetic written in numpy, and its gradients, clipping and refusals hold."""

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from rotexp.quant import clip_search
from rotexp.quant.clip_search import CLIP_RATIOS
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.quantizer import Quantizer
from rotexp.quant.spec import QuantSpec, nearest_divisors

WIDTH = 24
BITS = [2, 3, 4, 8]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Reference(NamedTuple):
    """Integer quantization in numpy, one entry a group: raw (unbounded) codes, codes, scale, zero point, values."""

    raw: Any
    codes: Any
    scale: Any
    zero: Any
    values: Floats


def reference_group(group: Floats, spec: QuantSpec, ratio: float) -> Reference:
    """Quantize one group in float32 scalars, rounding half to even."""
    levels = 2**spec.bits
    if spec.symmetric:
        lowest, highest = -levels // 2, levels // 2 - 1
        scale = np.abs(group).max() * np.float32(ratio) / np.float32(highest)
        low = np.float32(0)
    else:
        lowest, highest = 0, levels - 1
        low = np.minimum(group.min(), np.float32(0)) * np.float32(ratio)
        high = np.maximum(group.max(), np.float32(0)) * np.float32(ratio)
        scale = (high - low) / np.float32(highest)
    if scale < np.finfo(np.float32).tiny:
        scale = np.float32(1)
    zero = int(np.rint(-low / scale))
    raw = np.rint(group / scale).astype(np.int64) + zero
    codes = np.minimum(np.maximum(raw, lowest), highest)
    return Reference(raw, codes, scale, zero, (codes - zero).astype(np.float32) * scale)


def reference(x: Tensor, spec: QuantSpec, *, ratio: float | None = None) -> Reference:
    """Quantize `x: (..., width)` group by group; codes and values of its shape, scale and zero `(..., groups)`."""
    size = spec.group_size or x.shape[-1]
    chosen = spec.clip_ratio if ratio is None else ratio
    groups = [reference_group(group, spec, chosen) for group in x.float().numpy().reshape(-1, size)]
    raw, codes, scale, zero, values = (np.stack(part) for part in zip(*groups, strict=True))
    few = (*x.shape[:-1], x.shape[-1] // size)
    return Reference(
        raw.reshape(x.shape), codes.reshape(x.shape), scale.reshape(few), zero.reshape(few), values.reshape(x.shape)
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def special_rows() -> Tensor:
    """Rows `(16, WIDTH)` that are awkward to quantize."""
    x = normal(16, WIDTH)
    x[1] = 0.0
    x[2] = -x[2].abs() - 0.5
    x[3] = x[3].abs() + 0.5
    x[4] *= 1e30
    x[5] *= 1e-30
    x[6] = 3.7
    x[7] = -0.3
    x[8, 5] = 1000.0
    x[9, 1:] = 0.0
    x[10] *= 1e-43
    x[11, : WIDTH // 3] = 0.0
    x[12] = torch.arange(WIDTH) - 7.5
    x[13] = 1.0 + x[13] * 1e-6
    x[14] = -0.0
    x[15] = x[15].abs() * 1e-37
    return x


def gradient_of(quantizer: FakeQuantizer, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return an upstream gradient, the gradient that reaches `x`, and what was saved in between."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    leaf = x.clone().requires_grad_()
    upstream = normal(*x.shape, seed=9).to(x.dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = quantizer(leaf)
    (gradient,) = torch.autograd.grad(result, leaf, upstream)
    return upstream, gradient, saved


@pytest.mark.parametrize("clip_ratio", [1.0, 0.7])
@pytest.mark.parametrize("group_size", [None, 8, 1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_values_and_codes_equal_integer_reference(
    bits: int, symmetric: bool, group_size: int | None, clip_ratio: float
) -> None:
    spec = QuantSpec(bits, symmetric=symmetric, group_size=group_size, clip_ratio=clip_ratio)
    x = special_rows()
    expected = reference(x, spec)
    quantized = FakeQuantizer(spec).quantize(x)
    np.testing.assert_array_equal(FakeQuantizer(spec)(x).numpy(), expected.values)
    np.testing.assert_array_equal(quantized.codes.numpy(), expected.codes)
    np.testing.assert_array_equal(quantized.scale.numpy(), expected.scale)
    np.testing.assert_array_equal(quantized.zero.numpy(), expected.zero)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integer_form_dequantizes_to_the_fake_quantized_values(symmetric: bool, dtype: torch.dtype) -> None:
    quantizer = FakeQuantizer(QuantSpec(8, symmetric=symmetric, group_size=8, clip_search=True))
    x = special_rows().to(dtype)
    quantized = quantizer.quantize(x)
    assert quantized.codes.dtype == quantized.zero.dtype == (torch.int8 if symmetric else torch.uint8)
    codes = quantized.codes.clone()
    assert torch.equal(quantized.dequantize(dtype=dtype), quantizer(x))
    assert torch.equal(quantized.codes, codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_bfloat16_is_quantized_in_float32_and_rounded_once(bits: int, symmetric: bool) -> None:
    spec = QuantSpec(bits, symmetric=symmetric, clip_ratio=0.9)
    x = special_rows().bfloat16()
    result = FakeQuantizer(spec)(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, torch.from_numpy(reference(x, spec).values).bfloat16())


def test_keys_and_values_are_quantized_per_head_and_token_group() -> None:
    x = normal(2, 3, 5, 16) * torch.logspace(-3, 3, 30).view(2, 3, 5, 1)
    for group_size in (None, 4):
        spec = QuantSpec(4, symmetric=False, group_size=group_size)
        np.testing.assert_array_equal(FakeQuantizer(spec)(x).numpy(), reference(x, spec).values)
        assert FakeQuantizer(spec).quantize(x).scale.shape == (2, 3, 5, 16 // (group_size or 16))


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_rows_stay_zero_and_pass_their_gradient(symmetric: bool) -> None:
    quantizer = FakeQuantizer(QuantSpec(4, symmetric=symmetric, clip_ratio=0.5))
    x = torch.zeros(3, WIDTH)
    upstream, gradient, _ = gradient_of(quantizer, x)
    assert torch.equal(quantizer(x), x)
    assert torch.equal(gradient, upstream)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_nonfinite_values_show_in_their_group_and_nowhere_else(symmetric: bool, poison: float) -> None:
    quantizer = FakeQuantizer(QuantSpec(4, symmetric=symmetric, group_size=8))
    x = normal(3, WIDTH)
    clean = quantizer(x)
    x[1, 3] = poison
    result = quantizer(x)
    assert result[1, :8].isnan().all()
    assert torch.equal(result[1, 8:], clean[1, 8:])
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[0].expand(6, -1)])
@pytest.mark.parametrize("clip_search", [False, True])
def test_strides_do_not_matter(view: Callable[[Tensor], Tensor], clip_search: bool) -> None:
    spec = QuantSpec(4, symmetric=False, group_size=4, clip_search=clip_search)
    x = view(normal(16, 16))
    expected = FakeQuantizer(spec)(x.contiguous())
    assert torch.equal(FakeQuantizer(spec)(x), expected)
    assert torch.equal(gradient_of(FakeQuantizer(spec), x)[1], gradient_of(FakeQuantizer(spec), x.contiguous())[1])


@pytest.mark.parametrize("clip_search", [False, True])
def test_input_is_left_alone_and_may_be_empty(clip_search: bool) -> None:
    for x in (special_rows(), torch.empty(0, WIDTH)):
        before = x.clone()
        result = FakeQuantizer(QuantSpec(4, group_size=1, clip_search=clip_search))(x)
        assert torch.equal(x, before)
        assert result.shape == x.shape


@pytest.mark.parametrize("clip_ratio", [1.0, 0.6])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_error_is_at_most_half_a_step_where_nothing_is_clipped(bits: int, symmetric: bool, clip_ratio: float) -> None:
    spec = QuantSpec(bits, symmetric=symmetric, group_size=8, clip_ratio=clip_ratio)
    x = normal(64, WIDTH) + 0.3
    quantized = FakeQuantizer(spec).quantize(x)
    expected = reference(x, spec)
    steps = (quantized.dequantize() - x).abs() / quantized.scale.repeat_interleave(8, -1)
    inside = torch.from_numpy(expected.raw == expected.codes)
    assert steps[inside].max() <= 0.5 + 1e-5
    assert (clip_ratio < 1.0) == bool((steps > 0.5 + 1e-5).any())


@pytest.mark.parametrize(("symmetric", "places"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("bits", BITS)
def test_quantizing_twice_keeps_codes_and_all_but_the_last_places(bits: int, symmetric: bool, places: int) -> None:
    quantizer = FakeQuantizer(QuantSpec(bits, symmetric=symmetric))
    x = normal(256, 96, seed=3)
    once, twice = quantizer(x), quantizer(quantizer(x))
    assert torch.equal(quantizer.quantize(once).codes, quantizer.quantize(x).codes)
    assert np.all(np.abs((twice - once).numpy()) <= places * np.spacing(np.abs(once.numpy())))


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_clipping_the_gradient_is_the_identity_and_nothing_is_saved(symmetric: bool) -> None:
    upstream, gradient, saved = gradient_of(FakeQuantizer(QuantSpec(4, symmetric=symmetric)), special_rows())
    assert torch.equal(gradient, upstream)
    assert saved == []


def test_tie_at_the_top_of_an_unclipped_range_comes_back_by_one_code_and_keeps_its_gradient() -> None:
    quantizer = FakeQuantizer(QuantSpec(4, symmetric=False))
    x = torch.tensor([[-1.5, 0.0, 13.5]])
    upstream, gradient, _ = gradient_of(quantizer, x)
    assert quantizer(x).tolist() == [[-2.0, 0.0, 13.0]]
    assert torch.equal(gradient, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradient_is_zero_exactly_where_clipped_and_only_a_mask_is_saved(
    symmetric: bool, group_size: int | None, dtype: torch.dtype
) -> None:
    spec = QuantSpec(4, symmetric=symmetric, group_size=group_size, clip_ratio=0.7)
    x = special_rows().to(dtype)
    expected = reference(x, spec)
    clipped = torch.from_numpy(expected.raw != expected.codes)
    assert clipped.any()
    upstream, gradient, saved = gradient_of(FakeQuantizer(spec), x)
    assert torch.equal(gradient, upstream.masked_fill(clipped, 0.0))
    assert [(tensor.dtype, tensor.shape) for tensor in saved] == [(torch.bool, x.shape)]


def test_no_graph_without_a_gradient_to_take() -> None:
    quantizer = FakeQuantizer(QuantSpec(4, clip_ratio=0.7))
    x = normal(2, WIDTH).requires_grad_()
    with torch.no_grad():
        assert not quantizer(x).requires_grad
    assert not quantizer(x.detach()).requires_grad
    assert not quantizer.quantize(x).scale.requires_grad
    assert torch.equal(quantizer(x), quantizer(x.detach()))


@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_clip_search_agrees_with_brute_force(bits: int, symmetric: bool, group_size: int | None) -> None:
    spec = QuantSpec(bits, symmetric=symmetric, group_size=group_size, clip_search=True)
    x = normal(6, WIDTH, seed=bits) ** 3 + 0.2
    candidates = [reference(x, spec, ratio=ratio).values for ratio in CLIP_RATIOS]
    shape = (len(x), -1, group_size or WIDTH)
    errors = np.stack([((value - x.numpy()).astype(np.float64) ** 2).reshape(shape).sum(-1) for value in candidates])
    searched = ((FakeQuantizer(spec)(x) - x).double() ** 2).view(shape).sum(-1).numpy()
    np.testing.assert_allclose(searched, errors.min(0), rtol=1e-5, atol=1e-12)
    assert np.all(searched <= errors[0] * (1 + 1e-5))
    np.testing.assert_array_equal(
        FakeQuantizer(spec).search(x), np.array(CLIP_RATIOS, dtype=np.float32)[errors.argmin(0)]
    )


def test_clip_search_helps_where_an_outlier_stretches_the_range() -> None:
    x = normal(4, 512)
    x[:, 7] = 8.0
    plain, searched = (FakeQuantizer(QuantSpec(4, clip_search=search))(x) for search in (False, True))
    assert torch.all((searched - x).square().mean(-1) < 0.7 * (plain - x).square().mean(-1))


def test_clip_search_works_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuantSpec(4, group_size=8, clip_search=True)
    x = normal(50, WIDTH)
    whole = FakeQuantizer(spec).search(x)
    sizes: list[int] = []
    search = clip_search._best_ratios

    def record(rows: Tensor, *, quantizer: Quantizer) -> Tensor:
        sizes.append(rows.numel())
        return search(rows, quantizer=quantizer)

    monkeypatch.setattr(clip_search, "_best_ratios", record)
    monkeypatch.setattr(clip_search, "SEARCH_CHUNK_ELEMENTS", 203)
    assert torch.equal(FakeQuantizer(spec).search(x), whole)
    assert sizes == [200] * 6


def test_searched_ratios_are_kept_until_refreshed() -> None:
    spec = QuantSpec(3, clip_search=True)
    first, second = normal(8, 64), normal(8, 64, seed=1)
    quantizer = FakeQuantizer(spec)
    quantizer(first)
    assert not torch.equal(quantizer(second), FakeQuantizer(spec)(second))
    for row, ratio in enumerate(FakeQuantizer(spec).search(first)[:, 0].tolist()):
        assert torch.equal(quantizer(second)[row], FakeQuantizer(QuantSpec(3, clip_ratio=ratio))(second[row]))
    quantizer.refresh()
    assert torch.equal(quantizer(second), FakeQuantizer(spec)(second))


def test_ratios_cached_for_another_shape_are_refused() -> None:
    quantizer = FakeQuantizer(QuantSpec(4, group_size=8, clip_search=True))
    quantizer(normal(6, WIDTH))
    with pytest.raises(ValueError, match=r"\(6, 3\).*\(1, 24\).*\(1, 3\).*refresh"):
        quantizer(normal(1, WIDTH))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda quantizer: pickle.loads(pickle.dumps(quantizer))])
def test_copies_carry_the_cache_and_part_from_the_original(
    duplicate: Callable[[FakeQuantizer], FakeQuantizer],
) -> None:
    quantizer = FakeQuantizer(QuantSpec(3, clip_search=True))
    x, other = normal(8, 64), normal(8, 64, seed=1)
    quantizer(x.requires_grad_())
    twin = duplicate(quantizer)
    kept = quantizer(other)
    assert torch.equal(twin(other), kept)
    twin.refresh()
    assert not torch.equal(twin(other), kept)
    assert torch.equal(quantizer(other), kept)


def test_sixteen_bits_return_the_very_tensor() -> None:
    x = normal(2, WIDTH)
    assert FakeQuantizer(QuantSpec())(x) is x
    assert not QuantSpec().enabled
    with pytest.raises(ValueError, match="bits=16 has no integer form"):
        FakeQuantizer(QuantSpec()).quantize(x)


def test_group_size_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    for quantize in (FakeQuantizer(QuantSpec(4, group_size=50)), FakeQuantizer(QuantSpec(4, group_size=50)).quantize):
        with pytest.raises(ValueError, match="group_size=50 does not divide the width 576; set 48 or 64, or null"):
            quantize(torch.zeros(2, 576))
    assert nearest_divisors(12, near=13) == [12]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (QuantSpec(bits=1), "quant.weights.bits=1 is not one of (2, 3, 4, 5, 6, 7, 8, 16)"),
        (QuantSpec(bits=9), "quant.weights.bits=9 is not"),
        (QuantSpec(group_size=0), "quant.weights.group_size=0 is below 1; set null"),
        (QuantSpec(clip_ratio=0.0), "quant.weights.clip_ratio=0.0 is not in (0, 1]; set 1.0"),
        (QuantSpec(clip_ratio=1.1), "quant.weights.clip_ratio=1.1 is not in"),
        (QuantSpec(clip_ratio=float("nan")), "quant.weights.clip_ratio=nan is not in"),
        (QuantSpec(clip_ratio=0.9, clip_search=True), "quant.weights.clip_ratio=0.9 has no effect"),
    ],
)
def test_spec_refuses_values_without_a_meaning(spec: QuantSpec, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        spec.validate("quant.weights")
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=re.escape(message.replace("quant.weights", "spec"))):
        FakeQuantizer(spec)


def test_spec_is_a_structured_config() -> None:
    config = OmegaConf.merge(OmegaConf.structured(QuantSpec), {"bits": 4, "group_size": 32})
    assert OmegaConf.to_object(config) == QuantSpec(bits=4, group_size=32)


def test_spec_is_read_without_torch() -> None:
    code = "import sys, rotexp.quant.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("clip_ratio", [1.0, 0.7])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_encoded_tensors_give_values_and_gradient_again(
    bits: int, symmetric: bool, clip_ratio: float, group_size: int | None, dtype: torch.dtype
) -> None:
    quantizer = FakeQuantizer(QuantSpec(bits, symmetric=symmetric, group_size=group_size, clip_ratio=clip_ratio))
    x = special_rows().to(dtype)
    before = x.clone()
    values, encoded = quantizer.encode(x)
    assert torch.equal(values, quantizer(x))
    assert torch.equal(x, before)
    decoded, passes = encoded.decode(dtype=dtype)
    assert torch.equal(decoded, values)
    upstream, gradient, _ = gradient_of(quantizer, x)
    assert torch.equal(upstream if passes is None else upstream * passes.to(dtype), gradient)
    assert torch.equal(encoded.decode(dtype=dtype)[0], values)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (QuantSpec(4, clip_search=True), torch.int8),
        (QuantSpec(8), torch.int8),
        (QuantSpec(8, clip_ratio=0.9), torch.int16),
        (QuantSpec(6, symmetric=False, clip_ratio=0.9), torch.int8),
        (QuantSpec(7, symmetric=False, clip_ratio=0.9), torch.int16),
    ],
)
def test_encoded_codes_are_as_narrow_as_they_can_be(spec: QuantSpec, expected: torch.dtype) -> None:
    assert FakeQuantizer(spec).encode(special_rows())[1].codes.dtype == expected


def test_a_quantizer_that_is_off_encodes_nothing() -> None:
    with pytest.raises(ValueError, match="bits=16 has no integer form"):
        FakeQuantizer(QuantSpec()).encode(normal(2, WIDTH))
