"""Held-out quality: perplexity, KL divergence to the float model, agreement of the most likely token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rotexp.data.blocks import TokenBlocks


@dataclass(frozen=True)
class Quality:
    """Figures over every scored token: perplexity, KL in nats to the float model, share of equal top-1 tokens."""

    perplexity: float
    kl: float
    top1_agreement: float

    @classmethod
    def of_means(cls, nll: float, kl: float = 0.0, agreement: float = 1.0) -> Quality:
        """Make it of means over tokens; of the float model itself only the first is not known beforehand."""
        return cls(math.inf if nll >= 700 else math.exp(nll), kl, agreement)


class Likelihoods(NamedTuple):
    """What rows of logits say of their tokens; all but `weights` and `likeliest` are (rows,), float64.

    Attributes:
        nll: the target's negative log-likelihood, in nats.
        normalizer: log Σ exp(logit).
        likeliest: the most likely token, (rows,).
        weights: exp(logit − the largest), (rows, vocabulary), in the memory of the logits.
        total: the sum of `weights`.
    """

    nll: Tensor
    normalizer: Tensor
    likeliest: Tensor
    weights: Tensor
    total: Tensor


def likelihoods(logits: Tensor, targets: Tensor) -> Likelihoods:
    """Read logits once: (rows, vocabulary), float32, overwritten; targets are (rows,)."""
    largest, likeliest = logits.max(-1, keepdim=True)
    chosen = logits.gather(-1, targets[:, None])
    weights = logits.sub_(largest).exp_()
    total = weights.sum(-1).double()
    normalizer = largest[:, 0].double() + total.log()
    return Likelihoods(normalizer - chosen[:, 0].double(), normalizer, likeliest[:, 0], weights, total)


def compare(candidate: Tensor, reference: Tensor, targets: Tensor) -> Tensor:
    """Compare rows of logits, (rows, vocabulary), float32.

    Returns:
        (rows, 3), float64: the candidate's negative log-likelihood of the targets (rows,), KL(reference ‖ candidate),
        and 1 where both find the same token the most likely.
    """
    agreement = candidate.argmax(-1) == reference.argmax(-1)
    log_p, log_q = (F.log_softmax(logits, dim=-1) for logits in (reference, candidate))
    nll = -log_q.gather(-1, targets[:, None])[:, 0]
    kl = (log_p - log_q).mul_(log_p.exp_()).sum(-1)
    return torch.stack([figure.double() for figure in (nll, kl, agreement)], dim=-1)


def targets_of(token_ids: Tensor) -> Tensor:
    """Return the next token of each: (windows, tokens) to (windows * tokens,); those of the last are not scored."""
    return token_ids.roll(-1, dims=1).flatten()


def window_sums(figures: Tensor) -> Tensor:
    """Sum figures of all tokens but the last, which has no next one: (windows, tokens, n) to (windows, n)."""
    return figures[:, :-1].sum(1)


def window_shares(windows: int, *, batch: int, rank: int, world_size: int) -> list[list[int]]:
    """Return the window indices of each forward of one rank; every rank gets as many forwards.

    Ranks take turns by batches. One that has run out repeats window 0, whose score then is not counted twice because
    scores are collected by window.
    """
    batches = [list(range(start, min(start + batch, windows))) for start in range(0, windows, batch)]
    rounds = -(-len(batches) // world_size)
    mine = batches[rank::world_size]
    return mine + [[0]] * (rounds - len(mine))


CPU_TOKENS = 256
"""That a CPU is given at once: windows of 64 tokens took a sixth less time by four than by one (SmolLM2-135M), those of
256 as long."""


def tokens_a_forward(device: torch.device, *, width: int) -> int:
    """Return about how many tokens a forward is given: so many that more are no faster, if their states fit.

    Args:
        width: of the residual stream; a token's states take about 128 bytes of each of its numbers at their widest, of
            which a quarter of what is free is given.
    """
    if device.type == "cpu":
        return CPU_TOKENS
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    return int(min(8192, max(1, free / 4 / (128 * width))))


def windows_a_forward(windows: TokenBlocks, *, tokens: int, world_size: int) -> int:
    """Return how many windows come to that many tokens, but no more than leaves every rank, and eight, some to do.

    So worlds of up to eight ranks group windows alike, and their figures do not differ by that.

    Args:
        world_size: of the ranks that share the windows (1: group them alike in worlds of any size).
    """
    return max(1, min(tokens // int(windows.shape[1]), len(windows) // max(8, world_size)))


Scores = Callable[[tuple[int, ...], Tensor], Tensor]
"""Maps indices of windows and their token ids (batch, tokens) to sums over each window's tokens (batch, figures)."""


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

    def indices(self, windows: TokenBlocks) -> list[list[int]]:
        """Return the indices of the windows of each forward of this rank."""
        return window_shares(len(windows), batch=self.batch, rank=self.rank, world_size=self.world_size)

    @torch.no_grad()
    def means(self, scores_of: Scores, windows: TokenBlocks, *, figures: int) -> list[float]:
        """Return the mean over all scored tokens of each figure; windows are token ids (windows, tokens)."""
        scores = torch.zeros(len(windows), figures, dtype=torch.float64, device=self.device)
        for indices in self.indices(windows):
            scored = scores_of(tuple(indices), torch.from_numpy(windows[indices]).to(self.device))
            scores[indices] = scored if indices != [0] or self.rank == 0 else 0.0
        means: list[float] = (self.collect(scores).sum(0) / (len(windows) * (windows.shape[1] - 1))).tolist()
        return means
