"""Losses and gradients in chunks equal those of whole logits in float64, whatever head, dtype and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import VOCABULARY, make_source, make_token_ids, rotated, wanted
from torch import Tensor

from benchmarks.flops import count_flops
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation import readout
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.trainable import train_also
from rotexp.training.objectives import CrossEntropy, KLDivergence, TopKKLDivergence
from rotexp.training.options import Trainable

W4A4 = QuantConfig(weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False))
NATS = 2e-6
"""Largest error of a loss."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest error of a gradient, relative to its largest entry, by the model's dtype."""
ROWS = 7
K = 5
NAMES = ("llama", "qwen2", "gemma2 with binding caps", "cohere", "gptj")
"""A head of its own, one that R1 unties, a soft cap and a tied head, a factor, and a bias behind LayerNorms."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, _target: Tensor, token_ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten())


def divergence(logits: Tensor, target: Tensor, _token_ids: Tensor) -> Tensor:
    p, q = target.softmax(-1), logits.softmax(-1)
    return (p * (p / q).log()).sum(-1).mean()


def topk_divergence(logits: Tensor, target: Tensor, _token_ids: Tensor) -> Tensor:
    p, indices = target.softmax(-1).topk(K)
    q = logits.softmax(-1).gather(-1, indices)
    rest, other = 1.0 - p.sum(-1), 1.0 - q.sum(-1)
    return ((p * (p / q).log()).sum(-1) + rest * (rest / other).log()).mean()


OBJECTIVES: dict[str, tuple[Any, Loss]] = {
    "ce": (CrossEntropy(), cross_entropy),
    "kl": (KLDivergence(), divergence),
    "kl_topk": (TopKKLDivergence(K), topk_divergence),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "CHUNK_BYTES", 4 * VOCABULARY * ROWS)


def make_model(
    name: str,
    rotation: RotationConfig,
    params: Trainable,
    *,
    dtype: torch.dtype = torch.float32,
    quant: QuantConfig = W4A4,
) -> RotatedModel:
    model = rotated(make_source(name, dtype=dtype), rotation, quant, ready=False)
    train_also(model, params)
    prepare(model)
    return model


def gradients(model: RotatedModel, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of everything that is trained, and forget it."""
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: value.grad.double() for name, value in model.network.named_parameters() if value.grad is not None}
    model.network.zero_grad()
    return found


def expected_loss(model: RotatedModel, token_ids: Tensor, loss: Loss, teacher: Tensor | None) -> Tensor:
    """Return the loss of whole logits in float64."""
    with torch.no_grad(), model.mode.set(rotate=False, quantize=False):
        target = model.logits(token_ids) if teacher is None else teacher
    return loss(model.logits(token_ids).double(), target.double(), token_ids)


def check(model: RotatedModel, kind: str, *, teacher: Tensor | None, bound: float) -> None:
    objective, loss = OBJECTIVES[kind]
    token_ids = make_token_ids()
    with model.mode.set(rotate=True, quantize=True):
        whole = expected_loss(model, token_ids, loss, teacher)
        expected = gradients(model, whole)
        chunked = objective(model, token_ids, teacher=None if teacher is None else lambda _ids: teacher)
        found = gradients(model, 0.5 * chunked)  # a loss that is scaled, as gradients are accumulated
    assert chunked.dtype is torch.float32
    assert chunked.item() == pytest.approx(whole.item(), abs=NATS, rel=NATS)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (2.0 * found[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("params", [Trainable.rotations, Trainable.all])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_give_the_loss_and_every_gradient_of_whole_logits(name: str, params: Trainable, kind: str) -> None:
    model = make_model(name, wanted(name, "all"), params)
    check(model, kind, teacher=None, bound=BOUNDS[torch.float32])


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("params", [Trainable.rotations, Trainable.all])
def test_chunks_know_a_stream_that_keeps_its_basis(params: Trainable, kind: str) -> None:
    model = make_model("qwen2", wanted("qwen2", "all"), params, quant=QuantConfig(activations=W4A4.activations))
    check(model, kind, teacher=None, bound=BOUNDS[torch.float32])


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_autocast_rounds_no_logits(kind: str) -> None:
    model = make_model("llama", wanted("llama", "all"), Trainable.rotations, quant=QuantConfig())
    objective, token_ids = OBJECTIVES[kind][0], make_token_ids()
    with model.mode.set(rotate=True, quantize=True), torch.autocast("cpu"):
        objective(model, token_ids).backward()
    assert all(matrix.grad is not None and matrix.grad.isfinite().all() for _, matrix in model.bank.items())


def test_a_network_that_was_compiled_as_a_whole_is_refused() -> None:
    model = make_model("llama", wanted("llama", "all"), Trainable.rotations)
    model.network.compile(backend="eager")
    with pytest.raises(ValueError, match="compile its layers instead"):
        CrossEntropy()(model, make_token_ids())


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_trained_head_may_be_the_embedding(kind: str) -> None:
    model = make_model("qwen2", RotationConfig(r1=False, r2=True), Trainable.all)
    assert model.untied is None
    check(model, kind, teacher=None, bound=BOUNDS[torch.float32])


@pytest.mark.parametrize("kind", ["kl", "kl_topk"])
def test_a_second_model_teaches_in_chunks_too(kind: str) -> None:
    model = make_model("llama", RotationConfig(), Trainable.all)
    target = 3.0 * torch.randn(2, 10, VOCABULARY, generator=torch.Generator().manual_seed(3))
    check(model, kind, teacher=target, bound=BOUNDS[torch.float32])


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("params", [Trainable.rotations, Trainable.all])
def test_a_model_of_half_the_bytes_rounds_as_coarsely_in_chunks(params: Trainable, kind: str) -> None:
    model = make_model(
        "gemma2 with binding caps", wanted("gemma2 with binding caps", "all"), params, dtype=torch.bfloat16
    )
    check(model, kind, teacher=None, bound=BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("params", [Trainable.rotations, Trainable.all])
def test_chunks_take_no_more_products_than_whole_logits(params: Trainable, kind: str) -> None:
    model, token_ids = make_model("llama", RotationConfig(), params), make_token_ids()
    objective, loss = OBJECTIVES[kind]

    def whole() -> None:
        if objective.distills:
            expected_loss(model, token_ids, loss, None).backward()  # type: ignore[no-untyped-call]
        else:
            loss(model.logits(token_ids), token_ids, token_ids).backward()  # type: ignore[no-untyped-call]

    with model.mode.set(rotate=True, quantize=True):
        assert count_flops(lambda: objective(model, token_ids).backward()) <= count_flops(whole)


def test_no_whole_logits_are_kept_for_the_backward_pass() -> None:
    model, token_ids = make_model("llama", RotationConfig(), Trainable.rotations), make_token_ids(rows=4, tokens=60)
    kept: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape[-1]) or tensor, _same)
    with model.mode.set(rotate=True, quantize=True), hooks:
        CrossEntropy()(model, token_ids)
    assert kept
    assert VOCABULARY not in kept


def _same(tensor: Tensor) -> Tensor:
    return tensor
