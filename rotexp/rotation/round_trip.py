"""Quantizes activations in a rotated basis and comes back, with the gradient that moves a rotation, and no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.products import columns_gradient, rotate_columns


def round_trip(x: Tensor, *, rotation: Tensor, quantizer: FakeQuantizer) -> Tensor:
    """Return `Q(x R) Rᵀ` for an orthogonal R: what a residual stream that is not rotated must pass through.

    Where Q clips nothing, `Q(x R) = x R + e` with a rounding error e that straight-through gradients hold constant, so
    the result is `x + e Rᵀ`. For the upstream gradient G hence `dx = G` and `dR = Gᵀ e`, which is one product in place
    of four. This dR differs from that of the products written out by `(A + Aᵀ) R`, `A = xᵀ G`, which is normal to the
    orthogonal group at R: it moves no rotation, but counts in the norm of a gradient that is not projected (there it
    is most of it). Quantizers that clip get the gradients of the products written out.

    Args:
        x: (..., width).
        rotation: R, (n, n) or (blocks, n, n), as in `rotexp.rotation.products`.
        quantizer: Q.

    Returns:
        (..., width), of the dtype of x; x itself if the quantizer is off.
    """
    if not quantizer.spec.enabled:
        return x
    if quantizer.spec.clips:
        return rotate_columns(quantizer(rotate_columns(x, rotation)), rotation.mT)
    result: Tensor = _RoundTrip.apply(x, rotation, quantizer)  # type: ignore[no-untyped-call]
    return result


class _RoundTrip(torch.autograd.Function):
    """Saves the rounding error alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Tensor, quantizer: FakeQuantizer) -> Tensor:
        rotated = rotate_columns(x, rotation)
        quantized = quantizer(rotated)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(torch.sub(quantized, rotated, out=rotated), rotation)
        return rotate_columns(quantized, rotation.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        for_rotation = None
        if ctx.needs_input_grad[1]:
            error, rotation = ctx.saved_tensors
            for_rotation = columns_gradient(gradient, error, rotation)
        return gradient, for_rotation, None
