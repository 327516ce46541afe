"""Cross entropy of the next token: `objective=ce`."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from rotexp.rotation.model import RotatedModel
from rotexp.training.objectives.protocol import Teacher


class CrossEntropy:
    """Cross entropy of the next token, averaged over all tokens but the first of each block."""

    distills: ClassVar[bool] = False

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:  # noqa: ARG002
        """Return the mean loss, a scalar, for token_ids: (batch, tokens)."""
        logits = model.logits(token_ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())
