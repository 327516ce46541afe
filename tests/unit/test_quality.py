"""Held-out figures equal a loop over tokens in float64, however the windows are split over batches and ranks."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rotexp.metrics.quality import Quality, Share, evaluate, next_token_loss, score, window_shares

VOCABULARY, WINDOWS, TOKENS = 13, 7, 6
CPU = torch.device("cpu")
Forward = Callable[[Tensor], Tensor]


def bigram(seed: int, *, spread: float = 2.0) -> Forward:
    """A model whose logits depend on the present token alone; models of all seeds have something in common."""
    common, own = (torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(s)) for s in (0, seed))
    table = spread * (common + own)
    return lambda token_ids: table[token_ids]


@pytest.fixture
def windows() -> np.ndarray:
    return np.random.default_rng(0).integers(VOCABULARY, size=(WINDOWS, TOKENS))


def log_probabilities(logits: Tensor) -> np.ndarray:
    values = logits.double().numpy()
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def naive_scores(candidate: Forward, reference: Forward, windows: np.ndarray) -> np.ndarray:
    """Score token by token: (windows, 4)."""
    rows = []
    for window in windows:
        sums = np.zeros(4)
        q, p = (log_probabilities(forward(torch.from_numpy(window))) for forward in (candidate, reference))
        for position in range(len(window) - 1):
            target = window[position + 1]
            sums[0] -= q[position][target]
            sums[1] -= p[position][target]
            sums[2] += sum(math.exp(a) * (a - b) for a, b in zip(p[position], q[position], strict=True))
            sums[3] += p[position].argmax() == q[position].argmax()
        rows.append(sums)
    return np.array(rows)


def test_scores_equal_a_loop_over_tokens(windows: np.ndarray) -> None:
    token_ids = torch.from_numpy(windows)
    candidate, reference = bigram(1), bigram(2)
    scores = score(candidate(token_ids), reference(token_ids), token_ids)
    assert scores.dtype == torch.float64
    np.testing.assert_allclose(scores.numpy(), naive_scores(candidate, reference, windows), rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 50])
def test_figures_are_means_over_all_scored_tokens(windows: np.ndarray, batch: int) -> None:
    candidate, reference = bigram(1), bigram(2)
    found, own = evaluate(candidate, reference, windows, share=Share(batch, CPU))
    nll, own_nll, kl, agreement = naive_scores(candidate, reference, windows).sum(0) / (WINDOWS * (TOKENS - 1))
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-6)
    assert own.perplexity == pytest.approx(math.exp(own_nll), rel=1e-6)
    assert found.kl == pytest.approx(kl, rel=1e-5)
    assert found.top1_agreement == pytest.approx(agreement, rel=1e-12)
    assert 0.0 < found.top1_agreement < 1.0
    assert next_token_loss(candidate, windows, share=Share(batch, CPU)) == pytest.approx(nll, rel=1e-6)


def test_identical_models_agree_exactly(windows: np.ndarray) -> None:
    found, own = evaluate(bigram(1), bigram(1), windows, share=Share(2, CPU))
    assert found == own
    assert (found.kl, found.top1_agreement) == (0.0, 1.0)


def test_a_uniform_model_has_the_vocabulary_as_perplexity(windows: np.ndarray) -> None:
    found, _ = evaluate(bigram(1, spread=0.0), bigram(1), windows, share=Share(2, CPU))
    assert found.perplexity == pytest.approx(VOCABULARY, rel=1e-6)


def test_narrow_logits_are_scored_in_float32(windows: np.ndarray) -> None:
    token_ids, logits = torch.from_numpy(windows), bigram(1)(torch.from_numpy(windows)).bfloat16()
    assert torch.equal(score(logits, logits, token_ids), score(logits.float(), logits.float(), token_ids))


def test_the_first_token_is_not_scored_and_the_last_logits_are_not_read(windows: np.ndarray) -> None:
    token_ids = torch.from_numpy(windows)
    candidate, reference = bigram(1)(token_ids), bigram(2)(token_ids)
    expected = score(candidate, reference, token_ids)
    candidate[:, -1] = reference[:, -1] = float("nan")
    token_ids[:, 0] = 0
    assert torch.equal(score(candidate, reference, token_ids), expected)


def test_overflow_is_infinite_and_nan_stays_nan(windows: np.ndarray) -> None:
    def hopeless(token_ids: Tensor) -> Tensor:
        return -1e4 * torch.nn.functional.one_hot(token_ids.roll(-1, -1), VOCABULARY).float()

    def broken(token_ids: Tensor) -> Tensor:
        return torch.full((*token_ids.shape, VOCABULARY), float("nan"))

    assert evaluate(hopeless, bigram(1), windows, share=Share(2, CPU))[0].perplexity == math.inf
    assert math.isnan(evaluate(broken, bigram(1), windows, share=Share(2, CPU))[0].perplexity)


@pytest.mark.parametrize("windows", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("batch", [1, 2, 3, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shares_cover_every_window_once_in_as_many_forwards(windows: int, batch: int, world_size: int) -> None:
    shares = [window_shares(windows, batch=batch, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    batches = -(-windows // batch)
    fillers = len(shares[0]) * world_size - batches
    flat = sorted(index for share in shares for indices in share for index in indices)
    assert flat == sorted([*range(windows), *[0] * fillers])
    assert fillers < world_size
    assert all(len(indices) <= batch for share in shares for indices in share)


def split(windows: np.ndarray, *, batch: int, world_size: int) -> Quality:
    """Evaluate on ranks that run one after the other."""
    scores: list[Tensor] = []

    def keep(mine: Tensor) -> Tensor:
        scores.append(mine.clone())
        return mine

    def run(rank: int, collect: Callable[[Tensor], Tensor]) -> Quality:
        share = Share(batch, CPU, rank=rank, world_size=world_size, collect=collect)
        return evaluate(bigram(1), bigram(2), windows, share=share)[0]

    for rank in range(world_size):
        run(rank, keep)
    return run(0, lambda mine: torch.stack(scores).sum(0))


@pytest.mark.parametrize("count", [1, 2, WINDOWS])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_together_give_the_figures_of_one(windows: np.ndarray, count: int, batch: int, world_size: int) -> None:
    together = split(windows[:count], batch=batch, world_size=world_size)
    assert together == evaluate(bigram(1), bigram(2), windows[:count], share=Share(batch, CPU))[0]
