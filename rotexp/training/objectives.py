"""What training minimizes, on the rotated and fake-quantized network."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.rotation.model import RotatedModel


class Objective(Protocol):
    """A loss of a batch of blocks."""

    def __call__(self, model: RotatedModel, token_ids: Tensor) -> Tensor:
        """Return the mean loss in nats, a scalar, for token_ids: (batch, tokens)."""
        ...


class CrossEntropy:
    """Cross entropy of the next token, averaged over all tokens but the first of each block."""

    def __call__(self, model: RotatedModel, token_ids: Tensor) -> Tensor:
        """Return the mean loss, a scalar, for token_ids: (batch, tokens)."""
        logits = model.logits(token_ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())


class KLDivergence:
    """KL(float ‖ quantized) of the next-token distributions, averaged over all tokens.

    The teacher is the same model with rotation and quantization switched off.
    """

    def __call__(self, model: RotatedModel, token_ids: Tensor) -> Tensor:
        """Return the mean divergence, a scalar, for token_ids: (batch, tokens)."""
        teacher = F.log_softmax(_teacher_logits(model, token_ids), dim=-1).flatten(0, 1)
        student = F.log_softmax(model.logits(token_ids).float(), dim=-1).flatten(0, 1)
        return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


class TopKKLDivergence:
    """As `KLDivergence`, over the teacher's k most likely tokens and one event for all others.

    Merging events never raises a divergence, so this bounds the full one from below; they are equal at k = vocabulary.
    """

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, model: RotatedModel, token_ids: Tensor) -> Tensor:
        """Return the mean divergence, a scalar, for token_ids: (batch, tokens)."""
        teacher = F.softmax(_teacher_logits(model, token_ids), dim=-1).flatten(0, 1)
        likely, indices = teacher.topk(min(self.k, teacher.shape[-1]), dim=-1)
        student = F.softmax(model.logits(token_ids).float(), dim=-1).flatten(0, 1).gather(-1, indices)
        return F.kl_div(_with_rest(student).log(), _with_rest(likely), reduction="batchmean")


def _with_rest(probabilities: Tensor) -> Tensor:
    """Append the probability that is left: (tokens, k) to (tokens, k + 1), no entry below the smallest float32."""
    rest = 1.0 - probabilities.sum(-1, keepdim=True)
    return torch.cat([probabilities, rest], dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _teacher_logits(model: RotatedModel, token_ids: Tensor) -> Tensor:
    with model.mode.set(rotate=False, quantize=False):
        return model.logits(token_ids).float()
