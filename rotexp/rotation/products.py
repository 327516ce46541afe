"""Products of a weight with rotations and activations, with hand-derived gradients that keep little.

With input rotation R, output rotation L, fake quantizer Q and a weight W (outputs, inputs) it is `y = x Q(Lᵀ W R)ᵀ`.
For the upstream gradient G, straight through Q where it does not clip (mask M), hence `dx = G Q(Lᵀ W R)`,
`D = (Gᵀ x) ∘ M`, `dL = (W R) Dᵀ`, `dR = Wᵀ (L D)`, and `dW = L D Rᵀ` if W is trained.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotexp.models.arch import ValueRows
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.grouping import sum_groups
from rotexp.quant.straight_through import ratio_slopes


def rotated_linear(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    quantizer: FakeQuantizer,
    input_rotation: Tensor | None = None,
    output_rotation: Tensor | None = None,
    output_rows: ValueRows | None = None,
    keep_codes: bool = True,
) -> Tensor:
    """Return `x Q(Lᵀ W R)ᵀ + b`, rotating the weight; gradients reach x, W, b, R, L and learned clip ratios, once.

    For the backward pass it keeps x, the weight and the rotations, which others hold anyway, and of the quantized
    weight either codes, a quarter of its float32 size, or nothing (as where clip ratios are learned).

    Args:
        x: (..., inputs), quantized already where it should be.
        weight: (outputs, inputs), of the dtype of x.
        bias: (outputs,), rotated already.
        quantizer: Q; nothing is quantized if its spec is off.
        input_rotation: R, (n, n), repeated as often as it fits into inputs, or (blocks, n, n), block-diagonal; float32
            or float64. The weight is rotated in that dtype.
        output_rotation: L, likewise for the outputs.
        output_rows: which outputs L acts on; None for all.
        keep_codes: whether to keep the codes; if not, the backward pass rotates and quantizes the weight once more.

    Returns:
        (..., outputs), of the dtype of x.
    """
    result: Tensor = _RotatedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, input_rotation, output_rotation, quantizer.ratios, output_rows, quantizer, keep_codes
    )
    return result


class _RotatedLinear(torch.autograd.Function):
    """The formulas at the head of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Tensor | None,
        after: Tensor | None,
        ratios: Tensor | None,
        rows: ValueRows | None,
        quantizer: FakeQuantizer,
        keep_codes: bool,
    ) -> Tensor:
        used, encoded = rotate_weight(weight, before=before, after=after, rows=rows), None
        _, for_weight, _, for_before, for_after, for_ratios, *_ = ctx.needs_input_grad
        if quantizer.spec.enabled and keep_codes and any(ctx.needs_input_grad) and not for_ratios:
            used, encoded = quantizer.encode(used)
        else:
            used = quantizer(used)
        learned = for_weight or for_before or for_after or for_ratios
        codes = encoded.tensors if encoded else ()
        ctx.save_for_backward(x if learned else None, weight, before, after, ratios, *codes)
        ctx.rows, ctx.quantizer = rows, quantizer
        return F.linear(x, used, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before, after, ratios, *encoded = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_before, needs_after, needs_ratios, *_ = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        used, passes, slopes = _used_weight(ctx, weight, before, after, ratios, encoded)
        for_x = (flat @ used).reshape(*gradient.shape[:-1], -1) if needs_x else None
        del used
        for_bias = flat.sum(0) if needs_bias else None
        for_weight, for_before, for_after, for_ratios = None, None, None, None
        if needs_weight or needs_before or needs_after or needs_ratios:
            for_rotated = flat.mT @ x.reshape(-1, x.shape[-1])
            if slopes is not None:
                for_ratios = sum_groups(slopes.mul_(for_rotated), like=ratios)
            if passes is not None:
                for_rotated = for_rotated.mul_(passes)
            for_weight, for_before, for_after = weight_gradients(
                for_rotated,
                weight,
                before=before,
                after=after,
                rows=ctx.rows,
                needed=(needs_weight, needs_before, needs_after),
            )
        return for_x, for_weight, for_bias, for_before, for_after, for_ratios, None, None, None


def _used_weight(
    ctx: Any,
    weight: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    ratios: Tensor | None,
    encoded: list[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the weight that multiplied x, where its gradient passes (None: everywhere), and its slopes by the ratios.

    The last is None where ratios are not learned.
    """
    quantizer: FakeQuantizer = ctx.quantizer
    if encoded:
        return *quantizer.kept(*encoded).decode(dtype=weight.dtype), None
    rotated = rotate_weight(weight, before=before, after=after, rows=ctx.rows)
    if not quantizer.spec.enabled:
        return rotated, None, None
    used, passes = quantizer.encode(rotated)[1].decode(dtype=weight.dtype)
    if ratios is None or not ratios.requires_grad:
        return used, passes, None
    return used, passes, ratio_slopes(rotated, values=used, passes=passes, ratios=ratios)


def weight_gradients(
    for_rotated: Tensor,
    weight: Tensor,
    *,
    before: Tensor | None,
    after: Tensor | None,
    rows: ValueRows | None,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Derive dW, dR and dL from the gradient of `Lᵀ W R`."""
    needs_weight, needs_before, needs_after = needed
    for_before, for_after = None, None
    if after is not None and needs_after:
        once = weight if before is None else rotate_columns(weight, before)
        for_after = rows_gradient(once, for_rotated, after, rows=rows)
    if after is not None and (needs_weight or needs_before):
        for_rotated = rotate_rows(for_rotated, after.mT, rows=rows)
    if before is not None and needs_before:
        for_before = columns_gradient(weight, for_rotated, before)
    if before is not None and needs_weight:
        for_rotated = rotate_columns(for_rotated, before.mT)
    return for_rotated if needs_weight else None, for_before, for_after


def rotate_weight(weight: Tensor, *, before: Tensor | None, after: Tensor | None, rows: ValueRows | None) -> Tensor:
    """Return `Lᵀ W R`, (outputs, inputs), of the weight's dtype, which it is also rounded to in between."""
    if before is not None:
        weight = rotate_columns(weight, before)
    return weight if after is None else rotate_rows(weight, after, rows=rows)


def rotate_columns(values: Tensor, matrix: Tensor) -> Tensor:
    """Return `V R`.

    Args:
        values: V, (..., m * n), with m the number of R's blocks if it has its own.
        matrix: R, (n, n) or (m, n, n); computed in its dtype, returned in that of `values`.
    """
    blocks = _column_blocks(values, matrix)
    rotated = blocks @ matrix if matrix.ndim == 2 else torch.einsum("rbi,bij->rbj", blocks, matrix)
    return rotated.reshape(values.shape).to(values.dtype)


def columns_gradient(values: Tensor, gradient: Tensor, matrix: Tensor) -> Tensor:
    """Return the gradient of R, of its shape and dtype, from that of `rotate_columns(values, R)`."""
    values, gradient = _column_blocks(values, matrix), _column_blocks(gradient, matrix)
    return values.mT @ gradient if matrix.ndim == 2 else torch.einsum("rbi,rbj->bij", values, gradient)


def rotate_rows(values: Tensor, matrix: Tensor, *, rows: ValueRows | None) -> Tensor:
    """Return `Lᵀ V` on some rows of V, which keeps the others (None: on all).

    Args:
        values: V, (outputs, inputs).
        matrix: L, (n, n) or (m, n, n); computed in its dtype, returned in that of `values`.
        rows: the outputs that L acts on, m * n of them.
    """
    rotated = (matrix.mT @ _row_blocks(values, matrix, rows=rows)).to(values.dtype)
    if rows is None:
        return rotated.reshape(values.shape)
    result = values.clone()
    chosen = _choose(result, rows)
    chosen.copy_(rotated.reshape(chosen.shape))
    return result


def rows_gradient(values: Tensor, gradient: Tensor, matrix: Tensor, *, rows: ValueRows | None) -> Tensor:
    """Return the gradient of L, of its shape and dtype, from that of `rotate_rows(values, L)`."""
    values, gradient = (_row_blocks(tensor, matrix, rows=rows) for tensor in (values, gradient))
    products = values @ gradient.mT
    return products if matrix.ndim == 3 else products.sum(0)


def _column_blocks(values: Tensor, matrix: Tensor) -> Tensor:
    """View columns as rows of n for an (n, n) matrix, (rows * m, n), or as blocks for one of blocks, (rows, m, n)."""
    blocks = values.to(matrix.dtype).reshape(*values.shape[:-1], *_split(matrix))
    return blocks.reshape(-1, *matrix.shape[:-1])


def _row_blocks(values: Tensor, matrix: Tensor, *, rows: ValueRows | None) -> Tensor:
    """View the rows that a matrix acts on as (m, n, inputs)."""
    chosen = values if rows is None else _choose(values, rows)
    return chosen.to(matrix.dtype).reshape(*_split(matrix), values.shape[-1])


def _split(matrix: Tensor) -> tuple[int, int]:
    """Return what a rotated dimension is split into: the rotation's own blocks, or as many of n as it holds."""
    return (matrix.shape[0] if matrix.ndim == 3 else -1), matrix.shape[-1]


def _choose(values: Tensor, rows: ValueRows) -> Tensor:
    """View rows of (outputs, inputs) as (num_blocks, chosen, inputs)."""
    return torch.unflatten(values, 0, (rows.num_blocks, -1))[:, rows.start : rows.stop]
