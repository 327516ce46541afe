"""Divergence of the quantized network from the float one: `objective=kl`."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.rotation.model import RotatedModel
from rotexp.training.objectives.protocol import Teacher


class KLDivergence:
    """KL(float ‖ quantized) of the next-token distributions, averaged over all tokens.

    The teacher is the same model, rotation and quantization switched off, unless a second one is given.
    """

    distills: ClassVar[bool] = True

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:
        """Return the mean divergence, a scalar, for token_ids: (batch, tokens)."""
        target = F.log_softmax(target_logits(model, token_ids, teacher), dim=-1).flatten(0, 1)
        student = F.log_softmax(model.logits(token_ids).float(), dim=-1).flatten(0, 1)
        return F.kl_div(student, target, log_target=True, reduction="batchmean")


@torch.no_grad()
def target_logits(model: RotatedModel, token_ids: Tensor, teacher: Teacher | None) -> Tensor:
    """Return the float model's logits (batch, tokens, vocabulary), float32, without a gradient."""
    if teacher is not None:
        return teacher(token_ids).float()
    with model.mode.set(rotate=False, quantize=False):
        return model.logits(token_ids).float()
