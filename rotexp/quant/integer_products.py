"""Matrix products on 8-bit integer units: of codes, which is exact, and of floating-point rows with codes, by digits.

Units such as AVX-512 VNNI multiply int8 several times as fast as float32 and add up in int32 without an error. A
product of codes is an integer times scales. A floating-point row becomes a whole number of a unit of its own, written
in digits of 8 bits, each of which is multiplied exactly: the scheme of Ootomo, Ozaki and Yokota, "DGEMM on Integer
Matrix Multiplication Unit", arXiv:2306.11975, with a second factor that is an integer from the start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rotexp.quant.encoded import EncodedTensor
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.integers import Integers

DIGITS = {torch.float32: 4, torch.bfloat16: 2}
"""How many digits of 8 bits stand for a value of each dtype: as many as err less than a product in that dtype, unless
what is largest in a row meets codes of zero."""

LONGEST = 2**17 - 1
"""The longest sum of products of two int8 that int32 holds."""

LEAST_EXPONENT = -96
"""Rows below two to the power of this lose bits, so that their units are normal numbers."""


class Coded(NamedTuple):
    """A quantized matrix with one scale a row.

    Attributes:
        codes: `(rows, width)`, int8, contiguous, less their zero point.
        scale: `(rows, 1)`, float32; NaN where the row had NaN or infinity.
    """

    codes: Tensor
    scale: Tensor


@lru_cache(maxsize=1)
def has_integer_units() -> bool:
    """Return whether this CPU multiplies int8 exactly and faster than float32, and torch is built to let it.

    CPUs with AVX2 alone are not among them: their products of int8 saturate at 16 bits.
    """
    return bool(torch.backends.mkldnn.is_available()) and torch.cpu._is_vnni_supported()  # type: ignore[no-untyped-call]


def has_int8_form(quantizer: FakeQuantizer, width: int) -> bool:
    """Return whether what a quantizer makes of rows of some width are int8 codes times one scale a row.

    Asymmetric 8 bits are not: less their zero point, codes reach 255. Learned clip ratios need the values themselves.
    """
    if not quantizer.spec.enabled or type(quantizer.quantizer) is not Integers or quantizer.ratios is not None:
        return False
    lowest, highest = quantizer.quantizer.code_range
    return lowest >= -128 and highest <= 127 and quantizer.spec.num_groups(width) == 1


def can_multiply(x: Tensor, *, outputs: int) -> bool:
    """Return whether the integer units take x: (..., width) and a weight (outputs, width), forward and backward.

    Weights of one row or one column are not among them: for such strides torch 2.13 returns other numbers.
    """
    width = x.shape[-1]
    longest = max(width, outputs, x.numel() // max(1, width))
    fits = min(width, outputs) > 1 and longest <= LONGEST
    return fits and x.device.type == "cpu" and x.dtype in DIGITS and has_integer_units()


def coded_rows(encoded: EncodedTensor) -> Coded:
    """Return the rows of an encoded tensor `(..., width)`, which has an int8 form, as one matrix."""
    codes, scale = encoded.bounded()
    scale = scale.reshape(-1, 1)
    return Coded(codes.reshape(-1, codes.shape[-1]).contiguous(), scale + (scale - scale))


def multiply_codes(a: Coded, b: Coded) -> Tensor:
    """Return `A Bᵀ`, `(rows of a, rows of b)`, float32.

    Each element is the exact sum rounded once, and twice more by the scales, those of B first, which may not overflow:
    it is off by at most 3 · 2⁻²⁴ of itself.
    """
    products = torch._int_mm(a.codes, b.codes.mT)
    return products.to(torch.float32).mul_(b.scale.mT).mul_(a.scale)


def multiply_digits(values: Tensor, codes: Tensor, *, digits: int) -> Tensor:
    """Return `V C`, `(rows, columns)`, float32, each row of V in so many digits.

    With b = 8 · digits − 2 an element is off by at most 2²⁻ᵇ times the largest magnitude in its row of V times the
    magnitudes of its column of C, added up, and by 2⁻²² of itself. A row with NaN or infinity becomes NaN.

    Args:
        values: V, `(rows, n)`, float32, each row or each column contiguous; overwritten.
        codes: C, `(n, columns)`, int8, contiguous.
    """
    planes, unit = _split(values, digits)
    result = torch._int_mm(planes[0], codes).to(torch.float32)
    for plane in planes[1:]:
        result.mul_(256.0).add_(torch._int_mm(plane, codes))
    return result.mul_(unit)


def _split(values: Tensor, digits: int) -> tuple[list[Tensor], Tensor]:
    """Return signed digits, the highest first, each of the shape and layout of V, and the unit of each row."""
    largest = torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True))
    exponent = torch.frexp(largest).exponent.clamp_(LEAST_EXPONENT, 128)
    bits = 8 * digits - 2
    whole = values.mul_(_power_of_two(bits - exponent)).round_().to(torch.int32)
    # Digits from -128 to 127: half a range is added to all but the highest, and taken off again by their top bits.
    halves = sum(128 << 8 * place for place in range(digits - 1))
    whole.add_(halves)
    highest = (whole >> 8 * (digits - 1)).to(torch.int8)
    whole.bitwise_xor_(halves)
    lower = [(whole >> 8 * place).to(torch.int8) for place in reversed(range(digits - 1))]
    return [highest, *lower], _power_of_two(exponent - bits) + (largest - largest)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return exact powers, float32, of exponents from -126 to 127."""
    return (exponent.to(torch.int32) + 127 << 23).view(torch.float32)
