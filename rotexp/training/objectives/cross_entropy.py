"""Cross entropy of the next token: `objective=ce`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rotexp.metrics.quality import targets_of
from rotexp.rotation.model import RotatedModel
from rotexp.training.objectives.chunked import mean_loss
from rotexp.training.objectives.protocol import Teacher


class CrossEntropy:
    """Cross entropy of the next token, averaged over all tokens but the first of each block."""

    distills: ClassVar[bool] = False

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:  # noqa: ARG002
        """Return the mean loss, a scalar, for token_ids: (batch, tokens)."""
        following = targets_of(token_ids)
        counted = torch.ones_like(token_ids, dtype=torch.bool)
        counted[:, -1] = False
        counted = counted.flatten()

        def score(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            return _cross_entropy(logits, following[rows], counted[rows])

        return mean_loss(model, token_ids, lambda _readout: score, count=token_ids[:, 1:].numel())


def _cross_entropy(logits: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of −log softmax(z) at the targets, and softmax(z) less one there, in the memory of the logits.

    Args:
        logits: z, (rows, vocabulary), overwritten.
        targets: (rows,).
        counted: (rows,), False for rows that have no target.
    """
    logits -= logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    sums = logits.exp_().sum(-1)
    total = torch.where(counted, sums.log() - chosen, 0.0).sum()
    logits /= sums[:, None]
    logits.scatter_add_(-1, targets[:, None], logits.new_full((len(targets), 1), -1.0))
    return total, logits.masked_fill_(~counted[:, None], 0.0)
