"""Products on integer units: of codes they are exact, and by digits they err less than products in floating point."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.integer_products import (
    DIGITS,
    LONGEST,
    Coded,
    can_multiply,
    coded_rows,
    has_int8_form,
    has_integer_units,
    multiply_codes,
    multiply_digits,
)
from rotexp.quant.scales import QuantizerScales
from rotexp.quant.spec import QuantSpec

needs_units = pytest.mark.skipif(not has_integer_units(), reason="this CPU has no AVX-512 VNNI")
SIZES = [(1, 1, 1), (7, 33, 5), (64, 64, 64), (130, 576, 1536), (576, 1536, 97), (5, 4096, 576)]
EPSILON = torch.finfo(torch.float32).eps


def drawn(*shape: int, seed: int, spread: float = 0.0) -> Tensor:
    """Draw from a normal distribution, of log-normal magnitude if there is a spread."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    return values * torch.exp(spread * torch.randn(*shape, generator=generator))


def codes(rows: int, width: int, *, seed: int, lowest: int = -128, highest: int = 127) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(lowest, highest + 1, (rows, width), generator=generator, dtype=torch.int8)


@needs_units
@pytest.mark.parametrize(("rows", "width", "columns"), SIZES)
def test_a_product_of_codes_is_exact_but_for_the_rounding_of_its_result(rows: int, width: int, columns: int) -> None:
    a = Coded(codes(rows, width, seed=0), drawn(rows, 1, seed=1).abs())
    b = Coded(codes(columns, width, seed=2), drawn(columns, 1, seed=3).abs())
    exact = (a.codes.double() @ b.codes.double().T) * a.scale.double() * b.scale.double().T
    assert ((multiply_codes(a, b).double() - exact).abs() <= 1.5 * EPSILON * exact.abs()).all()


@needs_units
def test_the_longest_sum_of_the_largest_codes_does_not_overflow() -> None:
    a, one = codes(1, LONGEST, seed=0, highest=-128), torch.ones(1, 1)
    assert multiply_codes(Coded(a, one), Coded(a, one)).double().item() == pytest.approx(LONGEST * 2.0**14, rel=EPSILON)


@needs_units
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize(("rows", "width", "columns"), SIZES)
def test_a_product_by_digits_keeps_its_bound(
    rows: int, width: int, columns: int, dtype: torch.dtype, spread: float, by_columns: bool
) -> None:
    values, c = drawn(rows, width, seed=0, spread=spread).to(dtype).float(), codes(width, columns, seed=1)
    exact = values.double() @ c.double()
    given = values.T.contiguous().mT if by_columns else values.clone()
    result = multiply_digits(given, c, digits=DIGITS[dtype]).double()
    unit = 2.0 ** (2 - 8 * DIGITS[dtype] + 2)
    bound = unit * values.double().abs().amax(-1, keepdim=True) * c.double().abs().sum(0) + 2.0**-22 * exact.abs()
    assert ((result - exact).abs() <= bound).all()


@needs_units
@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize("width", [576, 1024, 1536, 4096])
def test_a_product_by_digits_errs_less_than_one_in_floating_point(
    width: int, dtype: torch.dtype, spread: float
) -> None:
    values, c = drawn(64, width, seed=0, spread=spread).to(dtype), codes(width, 96, seed=1, lowest=-15, highest=15)
    scale = drawn(1, width, seed=2).abs()
    exact = (values.double() * scale.double()) @ c.double()
    ours = multiply_digits(values * scale, c, digits=DIGITS[dtype]).to(dtype)
    theirs = values @ (c * scale.mT).to(dtype)
    assert torch.dist(ours.double(), exact) <= torch.dist(theirs.double(), exact)


@needs_units
def test_whole_numbers_are_multiplied_exactly() -> None:
    values, c = codes(9, 40, seed=0).float() * 2.0**-40, codes(40, 11, seed=1)
    expected = values.double() @ c.double()
    for digits in (2, 4):
        assert torch.equal(multiply_digits(values.clone(), c, digits=digits).double(), expected)


@needs_units
@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-38, 1e-30, 1e30])
def test_rows_of_any_magnitude_neither_overflow_nor_become_nan(magnitude: float) -> None:
    values, c = drawn(8, 32, seed=0) * magnitude, codes(32, 8, seed=1)
    exact = values.double() @ c.double()
    result = multiply_digits(values.clone(), c, digits=4).double()
    assert (result - exact).abs().max() <= 1e-6 * exact.abs().max() + 32 * 128 * 2.0**-127


@needs_units
@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_makes_its_row_nan_and_no_other(spoiled: float) -> None:
    values, c = drawn(4, 32, seed=0), codes(32, 8, seed=1)
    whole = multiply_digits(values.clone(), c, digits=4)
    values[2, 5] = spoiled
    result = multiply_digits(values.clone(), c, digits=4)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3]], whole[[0, 1, 3]])
    encoded = coded_rows(FakeQuantizer(QuantSpec(4, symmetric=False)).encode_codes(values))
    assert encoded.scale.isnan().squeeze().tolist() == [False, False, True, False]
    product = multiply_codes(encoded, Coded(c.T.contiguous(), torch.ones(8, 1)))
    assert product.isnan().any(-1).tolist() == [False, False, True, False]
    assert product[2].isnan().all()


@needs_units
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    values, c, before = drawn(1024, 576, seed=0), codes(576, 192, seed=1), torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(multiply_digits(values.clone(), c, digits=4))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (QuantSpec(), False),
        (QuantSpec(4), True),
        (QuantSpec(4, clip_search=True), True),
        (QuantSpec(8), True),
        (QuantSpec(8, clip_ratio=0.9), True),
        (QuantSpec(7, symmetric=False), True),
        (QuantSpec(8, symmetric=False), False),
        (QuantSpec(4, group_size=16), False),
        (QuantSpec(4, group_size=32), True),
    ],
)
def test_int8_codes_with_one_scale_a_row_have_the_form(spec: QuantSpec, expected: bool) -> None:
    quantizer = FakeQuantizer(spec)
    assert has_int8_form(quantizer, 32) is expected
    if expected:
        x = drawn(3, 5, 32, seed=0)
        coded = coded_rows(quantizer.encode_codes(x))
        assert coded.codes.dtype == torch.int8
        assert coded.codes.is_contiguous()
        torch.testing.assert_close((coded.codes * coded.scale).view_as(x), quantizer(x), rtol=0, atol=0)


def test_learned_clip_ratios_need_the_values() -> None:
    quantizer, scales = FakeQuantizer(QuantSpec(4)), QuantizerScales()
    quantizer.learned = scales.add("weight", torch.ones(16, 1))
    assert has_int8_form(quantizer, 32)
    scales.in_use = True
    assert not has_int8_form(quantizer, 32)


@needs_units
def test_the_units_take_float32_and_bfloat16_on_the_cpu_up_to_the_longest_sum() -> None:
    assert can_multiply(torch.empty(2, 3, 8), outputs=5)
    assert can_multiply(torch.empty(2, 3, 8, dtype=torch.bfloat16), outputs=5)
    assert not can_multiply(torch.empty(2, 3, 8, dtype=torch.float64), outputs=5)
    assert not can_multiply(torch.empty(2, 3, 8, device="meta"), outputs=5)
    assert not can_multiply(torch.empty(2, 3, 8), outputs=LONGEST + 1)
    assert not can_multiply(torch.empty(1, 1).expand(LONGEST + 1, 1), outputs=5)
