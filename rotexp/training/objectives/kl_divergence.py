"""Divergence of the quantized network from the float one: `objective=kl`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from rotexp.rotation.model import RotatedModel
from rotexp.rotation.readout import FinalStates, Readout, final_states
from rotexp.training.objectives.chunked import Score, mean_loss
from rotexp.training.objectives.protocol import Teacher


class KLDivergence:
    """KL(float ‖ quantized) of the next-token distributions, averaged over all tokens.

    The teacher is the same model, rotation and quantization switched off, unless a second one is given. Of the former
    only the final states are kept.
    """

    distills: ClassVar[bool] = True

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:
        """Return the mean divergence, a scalar, for token_ids: (batch, tokens)."""
        target = ask(model, token_ids) if teacher is None else teacher(token_ids).detach().flatten(0, 1)

        def scoring(readout: Readout) -> Score:
            targets = target_logits(target, readout)
            return lambda logits, rows: _divergence(logits, targets(rows))

        return mean_loss(model, token_ids, scoring, count=token_ids.numel())


def ask(model: RotatedModel, token_ids: Tensor) -> FinalStates:
    """Return the final states of the float model."""
    with model.mode.set(rotate=False, quantize=False):
        return final_states(model, token_ids)


@torch.no_grad()
def target_logits(target: FinalStates | Tensor, readout: Readout) -> Callable[[slice], Tensor]:
    """Return what gives the float model's logits of some tokens, (rows, vocabulary) float32 in memory of their own.

    Args:
        target: its final states, or its logits (tokens of the batch, vocabulary).
    """
    if isinstance(target, Tensor):
        whole = target
        return lambda rows: whole[rows].to(torch.float32, copy=True)
    inputs = readout.inputs(target)
    return lambda rows: readout.finish(readout.project(inputs[rows])).float()


def _divergence(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ p (log p − log q), and its gradient by the logits of q, which is q − p; both logits are overwritten.

    Args:
        logits, target: of q and p, (rows, vocabulary).
    """
    log_q = logits.sub_(logits.logsumexp(-1, keepdim=True))
    log_p = target.sub_(target.logsumexp(-1, keepdim=True))
    p = log_p.exp()
    total = log_p.sub_(log_q).mul_(p).sum(-1).sum()  # by rows: a sum of all at once is shared out to threads
    return total, log_q.exp_().sub_(p)
