"""Fake quantization as autograd sees it: straight through where nothing is clipped, and by learned clip ratios."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rotexp.quant.encoded import EncodedTensor, encode
from rotexp.quant.grouping import computed, grouped_by, sum_groups
from rotexp.quant.quantizer import Quantizer


class StraightThrough(Function):
    """Fake quantization that keeps a bool mask of unclipped values for the backward pass, or nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, groups: int, clip: float | Tensor, clips: bool) -> Tensor:
        """Return x fake-quantized; the arguments are those of `rotexp.quant.encoded.encode`."""
        grouped = computed(grouped_by(x, groups=groups))
        grid = quantizer.grid(grouped, clip)
        codes = quantizer.encode(grouped, grid, clips=clips)
        if clips and ctx.needs_input_grad[0]:
            bounded = grid.clamp(codes)
            # Comparing in place, in floating point, is vectorized on CPU; comparing into a bool tensor is not.
            ctx.save_for_backward(codes.eq_(bounded).bool().flatten(-2))
            codes = bounded
        elif clips:
            grid.clamp_(codes)
        return quantizer.decode(codes, grid.scale).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Let the gradient of x pass where it was not clipped."""
        for kept in ctx.saved_tensors:
            # As bytes, since neither masked_fill nor the conversion of a bool tensor is vectorized on CPU.
            gradient = kept.view(torch.uint8).to(gradient.dtype).mul_(gradient)
        return gradient, None, None, None, None


class LearnedStep(Function):
    """Fake quantization with learned ratios, which keeps its two arguments and quantizes once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ratios: Tensor, quantizer: Quantizer) -> Tensor:
        """Return x: (..., width) fake-quantized by ratios: (..., groups)."""
        ctx.save_for_backward(x, ratios)
        ctx.quantizer = quantizer
        return _encode(x, ratios, quantizer)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of x and of the ratios."""
        x, ratios = ctx.saved_tensors
        values, passes = _encode(x, ratios, ctx.quantizer)[1].decode(dtype=x.dtype)
        assert passes is not None, "learned ratios clip"
        for_ratios = None
        if ctx.needs_input_grad[1]:
            slopes = ratio_slopes(x, values=values, passes=passes, ratios=ratios)
            for_ratios = sum_groups(slopes.mul_(gradient), like=ratios)
        for_x = gradient * passes.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return for_x, for_ratios, None


def _encode(x: Tensor, ratios: Tensor, quantizer: Quantizer) -> tuple[Tensor, EncodedTensor]:
    return encode(x, quantizer=quantizer, groups=ratios.shape[-1], clip=ratios.unsqueeze(-1), clips=True)


def ratio_slopes(x: Tensor, *, values: Tensor, passes: Tensor | None, ratios: Tensor) -> Tensor:
    """Return the slope of each fake-quantized value by its group's clip ratio, `(..., width)`, of the grid's dtype.

    Equation 3 of Esser et al., "Learned Step Size Quantization", ICLR 2020: the slope by the scale is the value at a
    scale of 1, less x / scale where x is not clipped. The scale is the ratio times a constant (the group's extremes do
    not move), so the slope by the ratio is `(value − passes · x) / ratio`. The paper's factor on this gradient is left
    out: AdamW does not depend on it, and the joint norm of all gradients remains that of the loss.

    Args:
        x: `(..., width)`, what was quantized.
        values, passes: as `EncodedTensor.decode` gives them.
        ratios: `(..., groups)`.
    """
    errors = grouped_by(values - (x if passes is None else passes * x), groups=ratios.shape[-1])
    return errors.div_(ratios.unsqueeze(-1)).flatten(-2)
