"""What is kept of the float model gives the figures that whole logits do, in every family, state and mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCABULARY, logits, make_source, rotated, wanted
from torch import Tensor

from rotexp.metrics.float_answers import FloatAnswers, next_token_loss
from rotexp.metrics.quality import Quality, Share
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation import readout
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel

CPU = torch.device("cpu")
W4A8 = QuantConfig("w4a8", QuantSpec(4, clip_search=True), QuantSpec(8, symmetric=False))
WINDOWS = np.random.default_rng(0).integers(3, VOCABULARY, size=(5, 12))
SHARE = Share(2, CPU)
EXACT = 3e-6
"""Largest relative difference of a perplexity, and of a divergence."""
ROUNDED = 1e-7
"""Of a divergence also the largest absolute one, in parts of the largest logit."""

KEEPING_STATES = ("gemma2 with binding caps",)
"""Families whose logits are not linear in what the head reads."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a chunk hold seven tokens, fewer than a batch and no divisor of it."""
    monkeypatch.setattr(readout, "CHUNK_BYTES", 4 * VOCABULARY * 7)


def log_probabilities(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), dim=-1)[:, :-1]


def expected(candidate: Tensor, reference: Tensor) -> Quality:
    """Compare whole logits of all windows in float64."""
    log_q, log_p = log_probabilities(candidate), log_probabilities(reference)
    nll = -log_q.gather(-1, torch.from_numpy(WINDOWS)[:, 1:, None]).mean()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    return Quality(math.exp(float(nll)), float(kl), float(agreement))


def assert_equal(found: Quality, wanted: Quality, where: str = "", *, largest: float = 16.0) -> None:
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=EXACT), where
    assert found.kl == pytest.approx(wanted.kl, rel=EXACT, abs=ROUNDED * largest), where
    assert found.top1_agreement == pytest.approx(wanted.top1_agreement, rel=1e-12), where


def whole(model: RotatedModel, *, rotate: bool, quantize: bool) -> Tensor:
    """Return the logits of all windows in a mode, clip ratios searched anew; windows are grouped as they are shared."""
    model.refresh_quantizers()
    groups = (torch.from_numpy(WINDOWS[indices]) for indices in SHARE.indices(WINDOWS))
    return torch.cat([logits(model, token_ids, rotate=rotate, quantize=quantize) for token_ids in groups])


def stages(model: RotatedModel) -> Iterator[tuple[str, bool]]:
    """Take a placed model through the states of a run; yield their names, and whether it is rotated then."""
    yield "as it comes", False
    prepare(model)
    yield "prepared", False
    yield "rotated", True
    model.bank.assign({name: matrix.roll(1, dims=-1) for name, matrix in model.bank.items()})
    yield "rotated otherwise", True
    merge(model)
    yield "merged", True


@pytest.mark.parametrize("name", FAMILIES)
def test_every_variant_is_compared_as_by_whole_logits(name: str) -> None:
    model = rotated(make_source(name), wanted(name, "all"), W4A8, ready=False)
    original = whole(model, rotate=False, quantize=False)
    answers = FloatAnswers(WINDOWS, SHARE, expects=True)
    assert_equal(answers.make(model), expected(original, original))
    assert answers.complete == (name not in KEEPING_STATES)
    for stage, rotate in stages(model):
        wanted_figures = expected(whole(model, rotate=rotate, quantize=True), original)
        with model.mode.set(rotate=rotate, quantize=True):
            found = answers.compared(model)
            loss = next_token_loss(model, WINDOWS, share=SHARE)
        assert_equal(found, wanted_figures, stage, largest=float(original.abs().max()))
        assert math.exp(loss) == pytest.approx(found.perplexity, rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "phi", "qwen2", "gemma2 with binding caps"])
def test_variants_whose_stream_keeps_its_basis_are_compared_alike(name: str) -> None:
    model = rotated(make_source(name), wanted(name, "all"), QuantConfig(activations=W4A8.activations), ready=False)
    original = whole(model, rotate=False, quantize=False)
    answers = FloatAnswers(WINDOWS, SHARE, expects=True)
    answers.make(model)
    for stage, rotate in stages(model):
        wanted_figures = expected(whole(model, rotate=rotate, quantize=True), original)
        with model.mode.set(rotate=rotate, quantize=True):
            assert_equal(answers.compared(model), wanted_figures, stage, largest=float(original.abs().max()))


@pytest.mark.parametrize("name", ["llama", "phi", "cohere", "gemma2 with binding caps"])
@pytest.mark.parametrize("options", [{"expects": True}, {"expects": False}, {"expects": True, "kept": False}], ids=str)
def test_answers_may_be_made_at_any_state_and_kept_or_not(name: str, options: dict[str, bool]) -> None:
    model = rotated(make_source(name), wanted(name, "all"), W4A8, ready=False)
    made: dict[str, FloatAnswers] = {}
    for stage, rotate in stages(model):
        own, variant = (whole(model, rotate=rotate, quantize=quantize) for quantize in (False, True))
        with model.mode.set(rotate=rotate, quantize=True):
            made[stage] = FloatAnswers(WINDOWS, SHARE, **options)
            made[stage].make(model)
            found = {earlier: answers.compared(model) for earlier, answers in made.items()}
        for earlier, quality in found.items():
            assert_equal(quality, expected(variant, own), f"{earlier}, {stage}", largest=float(own.abs().max()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi", "gemma", "granite"])
def test_the_float_model_differs_from_itself_in_nothing(name: str) -> None:
    model = rotated(make_source(name), wanted(name, "all"), W4A8, ready=False)
    answers = FloatAnswers(WINDOWS, SHARE, expects=True)
    own = answers.make(model)
    assert answers.compared(model) == own
    assert (own.kl, own.top1_agreement) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2 with binding caps"])
@pytest.mark.parametrize("trained", ["norms", "head"])
@pytest.mark.parametrize("late", [False, True])
def test_a_model_whose_weights_were_trained_is_compared_with_the_one_that_was(
    name: str, trained: str, *, late: bool
) -> None:
    source = make_source(name)
    model, teacher = rotated(source, wanted(name, "all"), W4A8, ready=False), rotated(source, ready=False)
    for parameter in model.network.parameters():
        parameter.requires_grad_()  # so that folded norms act
    original = whole(model, rotate=False, quantize=False)
    answers = FloatAnswers(WINDOWS, SHARE, expects=trained == "norms")
    if not late:
        answers.make(model)
    prepare(model)
    change = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.network.named_parameters():
            if ("norm" in parameter_name and parameter.ndim == 1) or (trained == "head" and "head" in parameter_name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=change))
        if late:
            answers.make(model, teacher=teacher)
        wanted_figures = expected(whole(model, rotate=True, quantize=True), original)
        with model.mode.set(rotate=True, quantize=True):
            assert_equal(answers.compared(model, teacher=teacher), wanted_figures, trained)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_coarse_logits_are_read_again(dtype: torch.dtype) -> None:
    model = rotated(make_source("llama", dtype=dtype), wanted("llama", "all"), W4A8, ready=False)
    answers = FloatAnswers(WINDOWS, SHARE, expects=True)
    own = answers.make(model)
    assert not answers.complete
    found = answers.compared(model)
    assert found.perplexity == pytest.approx(own.perplexity, rel=1e-6)
    assert (found.kl, found.top1_agreement) == (0.0, 1.0)


def test_windows_are_grouped_and_shared_out_at_will() -> None:
    model = rotated(make_source("llama"), wanted("llama", "all"), W4A8, ready=False)

    def figures(batch: int, world_size: int) -> Quality:
        scores: list[Tensor] = []

        def keep(mine: Tensor) -> Tensor:
            scores.append(mine.clone())
            return mine

        def run(rank: int, collect: Callable[[Tensor], Tensor]) -> FloatAnswers:
            share = Share(batch, CPU, rank=rank, world_size=world_size, collect=collect)
            return FloatAnswers(WINDOWS, share, expects=True)

        ranks = [run(rank, keep) for rank in range(world_size)]
        for answers in ranks:
            answers.make(model)
        scores.clear()
        with model.mode.set(rotate=False, quantize=True):
            for answers in ranks:
                answers.compared(model)
        total = torch.stack(scores).sum(0).sum(0) / (len(WINDOWS) * (WINDOWS.shape[1] - 1))
        return Quality.of_means(*total.tolist())

    one = figures(2, 1)
    assert all(figures(2, world_size) == one for world_size in (2, 3, 4))
    for batch in (1, 3, 5, 9):
        assert_equal(figures(batch, 1), one)
