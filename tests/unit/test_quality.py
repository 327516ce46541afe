"""Held-out figures equal a loop over tokens in float64, however the windows are split over batches and ranks."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rotexp.metrics.quality import (
    Quality,
    Share,
    compare,
    likelihoods,
    targets_of,
    window_shares,
    window_sums,
    windows_a_forward,
)

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


def chosen(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return token ids (windows, tokens), and the targets of all of them in order."""
    token_ids = torch.from_numpy(windows)
    return token_ids, targets_of(token_ids)


def flat(forward: Forward, token_ids: Tensor) -> Tensor:
    return forward(token_ids).flatten(0, 1)


def test_comparing_equals_a_loop_over_tokens(windows: np.ndarray) -> None:
    token_ids, targets = chosen(windows)
    figures = compare(flat(bigram(1), token_ids), flat(bigram(2), token_ids), targets)
    assert figures.dtype == torch.float64
    found = window_sums(figures.reshape(*token_ids.shape, 3))
    wanted = naive_scores(bigram(1), bigram(2), windows)[:, [0, 2, 3]]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5)
    assert 0 < wanted[:, 2].sum() < WINDOWS * (TOKENS - 1)


def test_likelihoods_equal_a_loop_over_tokens(windows: np.ndarray) -> None:
    token_ids, targets = chosen(windows)
    logits = flat(bigram(1), token_ids)
    found = likelihoods(logits.clone(), targets)
    exact = torch.from_numpy(log_probabilities(logits))
    torch.testing.assert_close(found.weights.double() / found.total[:, None], exact.exp(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found.normalizer, torch.logsumexp(logits.double(), -1), rtol=1e-6, atol=0.0)
    assert torch.equal(found.likeliest, logits.argmax(-1))
    sums = window_sums(found.nll.reshape(*token_ids.shape, 1)).numpy()
    np.testing.assert_allclose(sums[:, 0], naive_scores(bigram(1), bigram(2), windows)[:, 0], rtol=1e-5)


def test_a_model_that_is_compared_with_itself_agrees_exactly(windows: np.ndarray) -> None:
    token_ids, targets = chosen(windows)
    _, kl, agreement = compare(flat(bigram(1), token_ids), flat(bigram(1), token_ids), targets).unbind(-1)
    assert bool((kl == 0.0).all())
    assert bool((agreement == 1.0).all())


def test_a_uniform_model_has_the_vocabulary_as_perplexity(windows: np.ndarray) -> None:
    token_ids, targets = chosen(windows)
    nll = likelihoods(flat(bigram(1, spread=0.0), token_ids), targets).nll
    assert Quality.of_means(float(nll.mean())).perplexity == pytest.approx(VOCABULARY, rel=1e-6)


def test_the_last_token_is_not_scored(windows: np.ndarray) -> None:
    token_ids, targets = chosen(windows)
    assert torch.equal(targets.reshape(token_ids.shape)[:, :-1], token_ids[:, 1:])
    figures = torch.rand(WINDOWS, TOKENS, 2)
    expected = window_sums(figures)
    figures[:, -1] = float("nan")
    assert torch.equal(window_sums(figures), expected)


def test_overflow_is_infinite_and_nan_stays_nan() -> None:
    targets = torch.tensor([1])
    hopeless = likelihoods(torch.tensor([[2e4, 0.0]]), targets)
    assert Quality.of_means(float(hopeless.nll)).perplexity == math.inf
    for broken in (torch.tensor([[math.nan, 0.0]]), torch.tensor([[0.0, math.nan]])):
        assert math.isnan(Quality.of_means(float(likelihoods(broken, targets).nll)).perplexity)


@pytest.mark.parametrize(
    ("tokens", "windows", "world_size", "batch"),
    [(256, 64, 1, 4), (256, 64, 8, 4), (256, 64, 16, 4), (256, 64, 32, 2), (256, 9, 1, 1), (32, 64, 1, 1)],
)
def test_windows_of_a_forward_leave_every_rank_some(tokens: int, windows: int, world_size: int, batch: int) -> None:
    text = np.zeros((windows, 64), dtype=np.int64)
    assert windows_a_forward(text, tokens=tokens, world_size=world_size) == batch


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


@pytest.mark.parametrize("count", [1, 2, WINDOWS])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_give_the_means_over_all_scored_tokens(
    windows: np.ndarray, count: int, batch: int, world_size: int
) -> None:
    few, scores, means = windows[:count], [], []

    def scores_of(indices: tuple[int, ...], token_ids: Tensor) -> Tensor:
        assert np.array_equal(few[list(indices)], token_ids.numpy())
        return token_ids.double().sum(-1, keepdim=True)

    def keep(mine: Tensor) -> Tensor:
        scores.append(mine.clone())
        return torch.stack(scores).sum(0)

    for rank in range(world_size):
        share = Share(batch, CPU, rank=rank, world_size=world_size, collect=keep)
        means.append(share.means(scores_of, few, figures=1)[0])
    assert means[-1] == pytest.approx(few.sum() / (count * (TOKENS - 1)), rel=1e-12)
