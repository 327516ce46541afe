"""Divergence over the likeliest tokens alone: `objective=kl_topk`."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.rotation.model import RotatedModel
from rotexp.rotation.readout import Readout
from rotexp.training.objectives.chunked import Score, mean_loss
from rotexp.training.objectives.kl_divergence import ask, target_logits
from rotexp.training.objectives.protocol import Teacher


class TopKKLDivergence:
    """As `KLDivergence`, over the teacher's k most likely tokens and one event for all others.

    Merging events never raises a divergence, so this bounds the full one from below; they are equal at k = vocabulary.
    """

    distills: ClassVar[bool] = True

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:
        """Return the mean divergence, a scalar, for token_ids: (batch, tokens)."""
        target = ask(model, token_ids) if teacher is None else teacher(token_ids).detach().flatten(0, 1)

        def scoring(readout: Readout) -> Score:
            targets = target_logits(target, readout)
            return lambda logits, rows: _divergence(logits, targets(rows), k=self.k)

        return mean_loss(model, token_ids, scoring, count=token_ids.numel())


def _divergence(logits: Tensor, target: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Return the divergence over k tokens and the rest, and its gradient by the logits z.

    With g the gradient by the k probabilities of q = softmax(z), it is q ∘ (g − Σ g q), g being 0 elsewhere.

    Args:
        logits, target: of q and p, (rows, vocabulary).
    """
    likely, indices = F.softmax(target, dim=-1).topk(min(k, target.shape[-1]), dim=-1)
    q = F.softmax(logits, dim=-1)
    with torch.enable_grad():
        chosen = q.gather(-1, indices).requires_grad_()
        divergences = F.kl_div(_with_rest(chosen).log(), _with_rest(likely), reduction="none")
        total = divergences.sum(-1).sum()  # by rows: a sum of all at once is shared out to threads
        (slopes,) = torch.autograd.grad(total, chosen)
    weighted = slopes * chosen.detach()
    return total.detach(), q.mul_(-weighted.sum(-1, keepdim=True)).scatter_add_(-1, indices, weighted)


def _with_rest(probabilities: Tensor) -> Tensor:
    """Append the probability that is left: (tokens, k) to (tokens, k + 1), no entry below the smallest float32."""
    rest = 1.0 - probabilities.sum(-1, keepdim=True)
    return torch.cat([probabilities, rest], dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
