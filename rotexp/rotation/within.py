"""Quantize in a rotated basis what stays in its own: a rotation within the quantizer of an input.

Where no weight is quantized, what lies between two linears needs no rotation but while it is quantized. With rotation
R and quantizer Q a reader gets `z = x + e Rᵀ` with `e = Q(x R) − x R`, which is Q(x R) Rᵀ. Straight through Q where it
does not clip, e is a constant, so for the upstream gradient G `dx = G` and `dR = Gᵀ e`: three products of tokens by
order² for all readers and writers of one input, while rotating what flows takes three for its readers and three for
its writers. To R that is the gradient of the quantization errors alone. What is missing of the gradient of the
rotated stream sums up to what does not change a float model along rotations: R S with S symmetric, normal to the
orthogonal matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.bank import Rotation


def quantize_within(x: Tensor, rotation: Rotation, quantizer: FakeQuantizer) -> Tensor:
    """Return `Q(x R) Rᵀ` in the dtype of x, computed in the rotation's; x itself if Q's spec is off.

    Gradients reach x and R. The backward pass needs e; where Q clips also x, for three products more.

    Args:
        x: (..., m * n), as `Rotation.rotate` takes it.
    """
    if not quantizer.spec.enabled:
        return x
    wide = x.to(torch.promote_types(x.dtype, rotation.matrix.dtype))
    if quantizer.clips:
        rotated = rotation.rotate(wide)
        error = quantizer(rotated) - rotated
    else:
        with torch.no_grad():
            rotated = rotation.rotate(wide)
            error = quantizer(rotated).sub_(rotated)
    return _add_unrotated(wide, error, rotation).to(x.dtype)


def _add_unrotated(x: Tensor, error: Tensor, rotation: Rotation) -> Tensor:
    """Return `x + e Rᵀ`, in one pass where R is one matrix: at 4096 tokens of width 576 that is a tenth of all."""
    matrix = rotation.matrix
    if matrix.ndim == 3 or matrix.dtype != x.dtype:
        return x + rotation.unrotate(error)
    values, errors = (tensor.reshape(-1, matrix.shape[-1]) for tensor in (x, error))
    return torch.addmm(values, errors, matrix.mT).reshape(x.shape)
