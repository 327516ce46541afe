"""Divergence over the likeliest tokens alone: `objective=kl_topk`."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.rotation.model import RotatedModel
from rotexp.training.objectives.kl_divergence import target_logits
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
        target = F.softmax(target_logits(model, token_ids, teacher), dim=-1).flatten(0, 1)
        likely, indices = target.topk(min(self.k, target.shape[-1]), dim=-1)
        student = F.softmax(model.logits(token_ids).float(), dim=-1).flatten(0, 1).gather(-1, indices)
        return F.kl_div(_with_rest(student).log(), _with_rest(likely), reduction="batchmean")


def _with_rest(probabilities: Tensor) -> Tensor:
    """Append the probability that is left: (tokens, k) to (tokens, k + 1), no entry below the smallest float32."""
    rest = 1.0 - probabilities.sum(-1, keepdim=True)
    return torch.cat([probabilities, rest], dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
