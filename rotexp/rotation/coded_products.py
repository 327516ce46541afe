"""The products of `rotexp.rotation.products` with a quantized activation, on integer units.

`y = x Q(Lᵀ W R)ᵀ` is a product of codes. The products with the upstream gradient G, `G Q(Lᵀ W R)` and `Gᵀ x`, are of
codes with the digits of G. All the rest, and all formulas, are those of the file named above, which is also the
reference: it serves every format, dtype and device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotexp.models.arch import ValueRows
from rotexp.quant.coded_input import CodedInput
from rotexp.quant.encoded import EncodedTensor
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.integer_products import DIGITS, Coded, coded_rows, multiply_codes, multiply_digits
from rotexp.rotation.products import rotate_weight, weight_gradients


def coded_linear(
    x: CodedInput,
    *,
    weight: Tensor,
    bias: Tensor | None,
    quantizer: FakeQuantizer,
    input_rotation: Tensor | None = None,
    output_rotation: Tensor | None = None,
    output_rows: ValueRows | None = None,
    keep_codes: bool = True,
) -> Tensor:
    """Return what `rotexp.rotation.products.rotated_linear` does, within the bounds of `rotexp.quant.integer_products`.

    For the backward pass it keeps the codes of x, a quarter of its float32 size, and of the weight as much as that.

    Args:
        x: (..., inputs), of the dtype of the weight.
        weight, bias, input_rotation, output_rotation, output_rows, keep_codes: as there.
        quantizer: Q, which has an int8 form.

    Returns:
        (..., outputs), of the dtype of x.
    """
    result: Tensor = _CodedLinear.apply(  # type: ignore[no-untyped-call]
        x.values, weight, bias, input_rotation, output_rotation, x.coded, output_rows, quantizer, keep_codes
    )
    return result


def coded_values_linear(x: CodedInput, *, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x Wᵀ + b` for a weight that is quantized already; bit for bit what `coded_linear` gives for its codes.

    Args:
        x: (..., inputs), of the dtype of the weight.
        weight: (outputs, inputs), codes times scales; gets its gradient, which knows nothing of clipping.
        scale: (outputs, 1), of the weight's rows.
        bias: (outputs,), rotated already.
    """
    result: Tensor = _CodedValuesLinear.apply(x.values, weight, bias, x.coded, scale)  # type: ignore[no-untyped-call]
    return result


def multiply(x: CodedInput, weight: Coded, bias: Tensor | None) -> Tensor:
    """Return `x Wᵀ + b`, (..., outputs), of the dtype of x."""
    y = multiply_codes(x.coded, weight)
    y = y if bias is None else y.add_(bias)
    return y.to(x.values.dtype).reshape(*x.values.shape[:-1], y.shape[-1])


class _CodedLinear(torch.autograd.Function):
    """The formulas at the head of `rotexp.rotation.products`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Tensor | None,
        after: Tensor | None,
        coded: Coded,
        rows: ValueRows | None,
        quantizer: FakeQuantizer,
        keep_codes: bool,
    ) -> Tensor:
        encoded = quantizer.encode_codes(rotate_weight(weight, before=before, after=after, rows=rows))
        _, for_weight, _, for_before, for_after, *_ = ctx.needs_input_grad
        of_x = coded if for_weight or for_before or for_after else ()
        of_weight = encoded.tensors if keep_codes and any(ctx.needs_input_grad) else ()
        ctx.save_for_backward(weight, before, after, *of_x, *of_weight)
        ctx.rows, ctx.quantizer, ctx.of_x = rows, quantizer, len(of_x)
        return multiply(CodedInput(x, coded), coded_rows(encoded), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, before, after, *kept = ctx.saved_tensors
        of_x, of_weight = kept[: ctx.of_x], kept[ctx.of_x :]
        needs_x, needs_weight, needs_bias, needs_before, needs_after, *_ = ctx.needs_input_grad
        encoded = _encoded_weight(ctx, weight, before, after, of_weight)
        for_x = _input_gradient(gradient, coded_rows(encoded)) if needs_x else None
        for_bias = _rows(gradient).sum(0) if needs_bias else None
        for_weight, for_before, for_after = None, None, None
        if needs_weight or needs_before or needs_after:
            for_rotated = _weight_gradient(gradient, Coded(*of_x))
            passes = encoded.passes()
            for_weight, for_before, for_after = weight_gradients(
                for_rotated if passes is None else for_rotated.mul_(passes),
                weight,
                before=before,
                after=after,
                rows=ctx.rows,
                needed=(needs_weight, needs_before, needs_after),
            )
        return for_x, for_weight, for_bias, for_before, for_after, None, None, None, None


class _CodedValuesLinear(torch.autograd.Function):
    """Finds the codes of the weight anew in backward, so that the weight may be freed and gathered in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, coded: Coded, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale, *coded)
        return multiply(CodedInput(x, coded), _codes_of(weight, scale), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, *coded = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        for_x = _input_gradient(gradient, _codes_of(weight, scale)) if needs_x else None
        for_weight = _weight_gradient(gradient, Coded(*coded)) if needs_weight else None
        return for_x, for_weight, _rows(gradient).sum(0) if needs_bias else None, None, None


def _codes_of(weight: Tensor, scale: Tensor) -> Coded:
    """Return the codes of a weight (outputs, inputs) that is quantized by scales (outputs, 1)."""
    return Coded((weight / scale).round_().to(torch.int8), scale)


def _rows(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).contiguous()


def _input_gradient(gradient: Tensor, weight: Coded) -> Tensor:
    """Return `G W`, (..., inputs)."""
    product = multiply_digits(_rows(gradient) * weight.scale.mT, weight.codes, digits=DIGITS[gradient.dtype])
    return product.to(gradient.dtype).reshape(*gradient.shape[:-1], -1)


def _weight_gradient(gradient: Tensor, x: Coded) -> Tensor:
    """Return `Gᵀ x`, (outputs, inputs)."""
    product = multiply_digits((_rows(gradient) * x.scale).mT, x.codes, digits=DIGITS[gradient.dtype])
    return product.to(gradient.dtype)


def _encoded_weight(
    ctx: Any, weight: Tensor, before: Tensor | None, after: Tensor | None, kept: list[Tensor]
) -> EncodedTensor:
    """Return the weight that multiplied x, kept or made once more."""
    quantizer: FakeQuantizer = ctx.quantizer
    if kept:
        return quantizer.kept(*kept)
    return quantizer.encode_codes(rotate_weight(weight, before=before, after=after, rows=ctx.rows))
