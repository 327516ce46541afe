"""Objectives equal a float64 oracle; what distills asks the teacher once, which gets no gradient."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rotexp.config.schema import COMPONENTS
from rotexp.config.targets import build
from rotexp.models.arch import LLAMA
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.mode import Mode
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.training.objectives import CrossEntropy, KLDivergence, TopKKLDivergence

VOCABULARY = 17
W4A4 = QuantConfig(weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False))


class States(nn.Module):
    """A decoder whose states are looked up."""

    def __init__(self, states: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.states = states

    def forward(self, token_ids: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.states(token_ids))


class Bigrams(nn.Module):
    """A network whose states are the logits of the token that follows; its head passes them on."""

    @torch.no_grad()
    def __init__(self, states: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="bigrams")
        self.model = States(states)
        self.lm_head = nn.Linear(VOCABULARY, VOCABULARY, bias=False).requires_grad_(False)
        self.lm_head.weight.copy_(torch.eye(VOCABULARY))

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, token_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(token_ids).last_hidden_state))


class Pair(RotatedModel):
    """A bigram model whose float and quantized logits are two tables; both want gradients."""

    def __init__(self, *, spread: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(0)
        tables = spread * torch.randn(2, VOCABULARY, VOCABULARY, generator=generator)
        self.teacher, self.student = (table.clone().requires_grad_() for table in tables)
        self.modes: list[tuple[bool, bool]] = []
        mode = Mode(rotate=True, quantize=True)
        super().__init__(Bigrams(self._states), replace(LLAMA, final_norm=None), RotationBank(), mode)

    def _states(self, token_ids: Tensor) -> Tensor:
        self.modes.append((self.mode.rotate, self.mode.quantize))
        return (self.student if self.mode.quantize else self.teacher)[token_ids]


def score(objective: Any, model: Any, token_ids: Tensor) -> Tensor:
    """Return the objective's loss; its teacher is the model itself, without rotation and quantization."""

    def teacher(asked: Tensor) -> Tensor:
        with model.mode.set(rotate=False, quantize=False):
            logits: Tensor = model.logits(asked)
        return logits

    loss: Tensor = objective(model, token_ids, teacher=teacher)
    return loss


@pytest.fixture
def pair() -> Any:
    return Pair()


@pytest.fixture
def batch() -> Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))


def probabilities(table: Tensor, token_ids: Tensor) -> np.ndarray:
    """Return p (tokens, vocabulary) in float64."""
    logits = table.detach().double().numpy()[token_ids.numpy()].reshape(-1, VOCABULARY)
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def mean_kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum(-1).mean())


def test_cross_entropy_scores_the_next_token(pair: Any, batch: Tensor) -> None:
    q = probabilities(pair.student, batch[:, :-1])
    expected = -np.log(q[np.arange(len(q)), batch[:, 1:].flatten().numpy()]).mean()
    loss = score(CrossEntropy(), pair, batch)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert pair.modes == [(True, True)]
    assert not CrossEntropy.distills


def test_kl_is_from_the_float_model_to_the_quantized(pair: Any, batch: Tensor) -> None:
    loss = score(KLDivergence(), pair, batch)
    assert loss.shape == ()
    p, q = probabilities(pair.teacher, batch), probabilities(pair.student, batch)
    assert loss.item() == pytest.approx(mean_kl(p, q), rel=1e-6)
    assert mean_kl(q, p) != pytest.approx(mean_kl(p, q), rel=1e-2)


def topk_oracle(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """KL over the teacher's k most likely tokens and all others as one event."""
    total = 0.0
    for own, other in zip(p, q, strict=True):
        kept = np.argsort(own)[::-1][:k]
        a = np.append(own[kept], 1.0 - own[kept].sum())
        b = np.append(other[kept], 1.0 - other[kept].sum())
        total += float((a * np.log(a / b)).sum())
    return total / len(p)


@pytest.mark.parametrize("k", [1, 2, 5, VOCABULARY - 1])
def test_topk_kl_compares_the_likely_tokens_and_the_rest_as_one(pair: Any, batch: Tensor, k: int) -> None:
    expected = topk_oracle(probabilities(pair.teacher, batch), probabilities(pair.student, batch), k)
    assert score(TopKKLDivergence(k), pair, batch).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("k", [VOCABULARY, 10 * VOCABULARY])
def test_topk_kl_of_the_whole_vocabulary_is_the_kl(pair: Any, batch: Tensor, k: int) -> None:
    full, topk = score(KLDivergence(), pair, batch), score(TopKKLDivergence(k), pair, batch)
    assert topk.item() == pytest.approx(full.item(), abs=2e-5)
    gradients = [torch.autograd.grad(loss, pair.student, retain_graph=True)[0] for loss in (full, topk)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_topk_kl_bounds_the_kl_from_below_and_grows_with_k(pair: Any, batch: Tensor) -> None:
    values = [score(TopKKLDivergence(k), pair, batch).item() for k in range(1, VOCABULARY)]
    assert all(smaller <= larger + 1e-6 for smaller, larger in pairwise(values))
    assert 0.0 < values[0] < 0.9 * values[-1]
    assert values[-1] <= score(KLDivergence(), pair, batch).item() + 1e-6


@pytest.mark.parametrize("objective", [KLDivergence(), TopKKLDivergence(5)], ids=["kl", "kl_topk"])
def test_the_teacher_is_asked_once_and_gets_no_gradient(pair: Any, batch: Tensor, objective: Any) -> None:
    score(objective, pair, batch).backward()
    assert pair.teacher.grad is None
    assert pair.student.grad.abs().max() > 0
    assert sorted(pair.modes) == [(False, False), (True, True)]
    assert objective.distills


@pytest.mark.parametrize("objective", [KLDivergence(), TopKKLDivergence(5)], ids=["kl", "kl_topk"])
def test_confident_models_give_finite_losses_and_gradients(batch: Tensor, objective: Any) -> None:
    extreme: Any = Pair(spread=200.0)
    loss = score(objective, extreme, batch)
    loss.backward()
    assert loss.isfinite()
    assert extreme.student.grad.isfinite().all()


@pytest.mark.parametrize("name", ["ce", "kl", "kl_topk"])
def test_the_config_builds_each_objective(name: str, pair: Any, batch: Tensor) -> None:
    component = COMPONENTS["objective"][name]
    expected = {"ce": CrossEntropy, "kl": KLDivergence, "kl_topk": TopKKLDivergence}[name]
    objective = build(component)
    assert type(objective) is expected
    assert getattr(objective, "k", None) == getattr(component, "k", None)


@pytest.mark.parametrize("objective", [KLDivergence(), TopKKLDivergence(5)], ids=["kl", "kl_topk"])
def test_the_divergence_of_a_model_that_quantizes_nothing_is_zero(
    llama: Callable[..., Any], rotated: Callable[..., Any], token_ids: Tensor, objective: Any
) -> None:
    source = llama(attention_bias=True, mlp_bias=True)
    nothing = RotationConfig(r1=False, r2=False)
    for rotation, quant, largest in ((nothing, None, 1e-7), (None, None, 1e-6), (nothing, W4A4, None)):
        model = rotated(source, rotation, quant)
        with torch.no_grad(), model.mode.set(rotate=True, quantize=True):
            divergence = score(objective, model, token_ids).item()
        assert divergence > 1e-3 if largest is None else abs(divergence) <= largest


@pytest.mark.parametrize(
    "objective", [CrossEntropy(), KLDivergence(), TopKKLDivergence(5)], ids=["ce", "kl", "kl_topk"]
)
def test_every_rotation_gets_a_gradient(
    llama: Callable[..., Any], rotated: Callable[..., Any], token_ids: Tensor, objective: Any
) -> None:
    model = rotated(llama(), quant=W4A4)
    with model.mode.set(rotate=True, quantize=True):
        score(objective, model, token_ids).backward()
    for _, matrix in model.bank.items():
        assert matrix.grad.isfinite().all()
        assert matrix.grad.abs().max() > 0
