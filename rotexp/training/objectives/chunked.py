"""A mean loss of next-token distributions whose logits, and their gradients, are only ever there for a few tokens.

For each chunk of tokens x (rows, hidden) the forward pass computes z = x Wᵀ + b, the loss L(z), G = dL/dz, and at once
what the backward pass needs: dx = G W, and dW = Gᵀ x and db = Σ G where the head is trained. So neither z nor G is kept
and nothing is computed twice; the backward pass multiplies by the gradient that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotexp.rotation.model import RotatedModel
from rotexp.rotation.readout import Readout, read

Score = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""Maps the logits of a chunk, (rows, vocabulary) float32, and which tokens of the batch these rows are, to the sum of
their losses, a scalar, and its gradient by the logits, in whose memory it may be."""


def mean_loss(model: RotatedModel, token_ids: Tensor, scoring: Callable[[Readout], Score], *, count: int) -> Tensor:
    """Return the sum of the scores of all tokens by `count`, a float32 scalar with a gradient.

    Its gradient reaches all that the logits depend on. It differs from that of whole logits in float64 by at most 2e-6
    nats, and each parameter's gradient by at most 1e-4 of its largest entry (3e-2 in a bfloat16 model, which rounds the
    slopes of whole logits as well; where its norms subtract means, a divergence errs by 1e-3 nats). The layers below
    the head compute in the model's dtype: biases of keys, whose gradient nearly cancels there, err most.

    Args:
        model: in the mode in which it is scored.
        token_ids: (batch, tokens).
        scoring: returns, when the network has come to its head, what scores each chunk.
    """
    exact: list[Tensor] = []

    def work(readout: Readout) -> Tensor:
        inputs = readout.inputs()
        total: Tensor = _ChunkedSum.apply(inputs, readout.weight, readout.bias, readout, scoring(readout))  # type: ignore[no-untyped-call]
        exact.append(total / count)
        return exact[0]

    loss = read(model, token_ids, work)
    # A policy of mixed precision may cast what the network returns. The gradient has to pass there, the value not.
    return loss if loss.dtype is exact[0].dtype else loss.float() + (exact[0] - loss.float()).detach()


class _ChunkedSum(torch.autograd.Function):
    """The sum of the scores of all tokens, with the products at the head of this file."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, readout: Readout, score: Score
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=inputs.device)
        gradients = _Gradients(inputs, weight, bias, needed=ctx.needs_input_grad[:3])
        with torch.autocast(inputs.device.type, enabled=False):  # which would round logits and slopes
            for rows in readout.chunks():
                projected = readout.project(inputs[rows])
                value, slopes = _score(readout, projected, rows, score)
                total += value
                gradients.add(rows, slopes)
        ctx.save_for_backward(*gradients.tensors)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (inputs, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [None if saved is None else (saved * gradient).to(dtype) for saved, dtype in pairs]
        return *scaled, None, None


def _score(readout: Readout, projected: Tensor, rows: slice, score: Score) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk and its gradient by what the head returned, (rows, vocabulary), of its dtype."""
    with torch.enable_grad():
        leaf = projected.detach().requires_grad_()
        finished = readout.finish(leaf)
    if finished is leaf:
        value, slopes = score(projected.float(), rows)
    else:
        value, slopes = score(finished.detach().float().clone(), rows)
        (slopes,) = torch.autograd.grad(finished, leaf, slopes.to(finished.dtype))
    return value, slopes.to(projected.dtype)


class _Gradients:
    """Collects the gradients of x, W and b over chunks, those of W and b in float32 at least."""

    def __init__(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, needed: tuple[bool, bool, bool]) -> None:
        for_inputs, for_weight, for_bias = needed
        self._inputs, self._weight = inputs, weight
        self._for_inputs = torch.empty_like(inputs) if for_inputs else None
        self._for_weight = _zeros(weight) if for_weight else None
        self._for_bias = _zeros(bias) if for_bias and bias is not None else None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, W and b; None for those that nobody needs."""
        return self._for_inputs, self._for_weight, self._for_bias

    def add(self, rows: slice, slopes: Tensor) -> None:
        """Take G of a chunk, (rows, vocabulary)."""
        if self._for_inputs is not None:
            torch.mm(slopes, self._weight, out=self._for_inputs[rows])
        if self._for_weight is not None:
            inputs, total = self._inputs[rows], self._for_weight
            if total.dtype is slopes.dtype:
                total.addmm_(slopes.mT, inputs)
            else:
                total += slopes.mT @ inputs
        if self._for_bias is not None:
            self._for_bias += slopes.sum(0, dtype=self._for_bias.dtype)


def _zeros(parameter: Tensor) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
