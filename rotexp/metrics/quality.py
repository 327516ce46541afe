"""Held-out quality: perplexity, KL divergence to the float model, agreement of the most likely token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.data.blocks import TokenBlocks

Forward = Callable[[Tensor], Tensor]
"""Maps token ids (batch, tokens) to logits (batch, tokens, vocabulary)."""


@dataclass(frozen=True)
class Quality:
    """Figures over every scored token: perplexity, KL in nats to the float model, share of equal top-1 tokens."""

    perplexity: float
    kl: float
    top1_agreement: float


@torch.no_grad()
def score(candidate: Tensor, reference: Tensor, token_ids: Tensor) -> Tensor:
    """Score windows of tokens; every token but the first of a window is scored.

    Args:
        candidate, reference: logits (batch, tokens, vocabulary).
        token_ids: (batch, tokens).

    Returns:
        (batch, 4), float64: for each window the sums of the candidate's negative log-likelihood, the reference's, the
        divergence KL(reference ‖ candidate), and of equal most likely tokens.
    """
    log_p, log_q = (F.log_softmax(logits[:, :-1].float(), dim=-1) for logits in (reference, candidate))
    targets = token_ids[:, 1:, None]
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    agreement = log_p.argmax(-1) == log_q.argmax(-1)
    scores = (-log_q.gather(-1, targets)[..., 0], -log_p.gather(-1, targets)[..., 0], kl, agreement)
    return torch.stack([figure.to(torch.float64).sum(-1) for figure in scores], dim=-1)


def window_shares(windows: int, *, batch: int, rank: int, world_size: int) -> list[list[int]]:
    """Return the window indices of each forward of one rank; every rank gets as many forwards.

    Ranks take turns by batches. One that has run out repeats window 0, whose score then is not counted twice because
    scores are collected by window.
    """
    batches = [list(range(start, min(start + batch, windows))) for start in range(0, windows, batch)]
    rounds = -(-len(batches) // world_size)
    mine = batches[rank::world_size]
    return mine + [[0]] * (rounds - len(mine))


@dataclass(frozen=True)
class Share:
    """How the forwards over held-out windows are shared out to ranks.

    Attributes:
        batch: windows a forward.
        collect: sums the scores (windows, figures) over ranks.
    """

    batch: int
    device: torch.device
    rank: int = 0
    world_size: int = 1
    collect: Callable[[Tensor], Tensor] = lambda scores: scores

    @torch.no_grad()
    def means(self, scores_of: Callable[[Tensor], Tensor], windows: TokenBlocks, *, figures: int) -> list[float]:
        """Return the mean over all scored tokens of each figure.

        Args:
            scores_of: maps token ids (batch, tokens) to the sums of each window (batch, figures).
            windows: token ids (windows, tokens).
        """
        scores = torch.zeros(len(windows), figures, dtype=torch.float64, device=self.device)
        for indices in window_shares(len(windows), batch=self.batch, rank=self.rank, world_size=self.world_size):
            scored = scores_of(torch.from_numpy(windows[indices]).to(self.device))
            scores[indices] = scored if indices != [0] or self.rank == 0 else 0.0
        means: list[float] = (self.collect(scores).sum(0) / (len(windows) * (windows.shape[1] - 1))).tolist()
        return means


def evaluate(candidate: Forward, reference: Forward, windows: TokenBlocks, *, share: Share) -> tuple[Quality, Quality]:
    """Compare a candidate with a reference on held-out windows, token ids (windows, tokens).

    Returns:
        The candidate's figures and the reference's own.
    """

    def scores_of(token_ids: Tensor) -> Tensor:
        return score(candidate(token_ids), reference(token_ids), token_ids)

    nll, reference_nll, kl, agreement = share.means(scores_of, windows, figures=4)
    return Quality(_exp(nll), kl, agreement), Quality(_exp(reference_nll), 0.0, 1.0)


def next_token_loss(candidate: Forward, windows: TokenBlocks, *, share: Share) -> float:
    """Return the candidate's mean negative log-likelihood in nats: the logarithm of the perplexity of `evaluate`."""

    def scores_of(token_ids: Tensor) -> Tensor:
        log_q = F.log_softmax(candidate(token_ids)[:, :-1].float(), dim=-1)
        return -log_q.gather(-1, token_ids[:, 1:, None])[..., 0].to(torch.float64).sum(-1, keepdim=True)

    return share.means(scores_of, windows, figures=1)[0]


def _exp(nll: float) -> float:
    return math.inf if nll >= 700 else math.exp(nll)
