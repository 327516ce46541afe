"""What training minimizes, on the rotated and fake-quantized network."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.rotation.model import RotatedModel

Teacher = Callable[[Tensor], Tensor]
"""Maps token ids (batch, tokens) to the float model's logits (batch, tokens, vocabulary)."""


class Objective(Protocol):
    """A loss of a batch of blocks; `distills` says whether it asks the teacher."""

    distills: ClassVar[bool]

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:
        """Return the mean loss in nats, a scalar, for token_ids: (batch, tokens)."""
        ...


class CrossEntropy:
    """Cross entropy of the next token, averaged over all tokens but the first of each block."""

    distills: ClassVar[bool] = False

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:  # noqa: ARG002
        """Return the mean loss, a scalar, for token_ids: (batch, tokens)."""
        logits = model.logits(token_ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())


class KLDivergence:
    """KL(float ‖ quantized) of the next-token distributions, averaged over all tokens.

    The teacher is the same model, rotation and quantization switched off, unless a second one is given.
    """

    distills: ClassVar[bool] = True

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:
        """Return the mean divergence, a scalar, for token_ids: (batch, tokens)."""
        target = F.log_softmax(_target_logits(model, token_ids, teacher), dim=-1).flatten(0, 1)
        student = F.log_softmax(model.logits(token_ids).float(), dim=-1).flatten(0, 1)
        return F.kl_div(student, target, log_target=True, reduction="batchmean")


class TopKKLDivergence:
    """As `KLDivergence`, over the teacher's k most likely tokens and one event for all others.

    Merging events never raises a divergence, so this bounds the full one from below; they are equal at k = vocabulary.
    """

    distills: ClassVar[bool] = True

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:
        """Return the mean divergence, a scalar, for token_ids: (batch, tokens)."""
        target = F.softmax(_target_logits(model, token_ids, teacher), dim=-1).flatten(0, 1)
        likely, indices = target.topk(min(self.k, target.shape[-1]), dim=-1)
        student = F.softmax(model.logits(token_ids).float(), dim=-1).flatten(0, 1).gather(-1, indices)
        return F.kl_div(_with_rest(student).log(), _with_rest(likely), reduction="batchmean")


def _with_rest(probabilities: Tensor) -> Tensor:
    """Append the probability that is left: (tokens, k) to (tokens, k + 1), no entry below the smallest float32."""
    rest = 1.0 - probabilities.sum(-1, keepdim=True)
    return torch.cat([probabilities, rest], dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _target_logits(model: RotatedModel, token_ids: Tensor, teacher: Teacher | None) -> Tensor:
    if teacher is not None:
        return teacher(token_ids).float()
    with model.mode.set(rotate=False, quantize=False):
        return model.logits(token_ids).float()
