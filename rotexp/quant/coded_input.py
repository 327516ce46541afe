"""What linears that multiply in integers read: the codes of their input, and where its gradient goes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.integer_products import Coded, coded_rows


class CodedInput(NamedTuple):
    """A fake-quantized tensor that is nowhere written out.

    Attributes:
        values: `(..., width)`, of the dtype of x: stands for the values in autograd, which adds up its readers'
            gradients and passes them on to x. It has no memory, and whoever reads it finds NaN.
        coded: the rows.
    """

    values: Tensor
    coded: Coded


def code_input(x: Tensor, quantizer: FakeQuantizer) -> CodedInput:
    """Return what `quantizer(x)` does, in codes, with the same gradient.

    Args:
        x: `(..., width)`, floating point.
        quantizer: with an int8 form (see `rotexp.quant.integer_products.has_int8_form`).
    """
    values, *coded = _StraightThroughCodes.apply(x, quantizer)  # type: ignore[no-untyped-call]
    return CodedInput(values, Coded(*coded))


class _StraightThroughCodes(torch.autograd.Function):
    """Keeps a mask of unclipped values for the backward pass, or nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: FakeQuantizer) -> tuple[Tensor, Tensor, Tensor]:
        encoded = quantizer.encode_codes(x)
        passes = encoded.passes() if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(*([] if passes is None else [passes.to(torch.uint8)]))
        coded = coded_rows(encoded)
        ctx.mark_non_differentiable(*coded)
        return x.new_full((), torch.nan).expand(x.shape), *coded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        for passes in ctx.saved_tensors:
            gradient = passes.to(gradient.dtype).mul_(gradient)
        return gradient, None
