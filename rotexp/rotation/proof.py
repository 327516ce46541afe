"""Prepare a model and merge its rotations, each with the proof that the float model still computes what it did."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.errors.wording import few
from rotexp.orthogonal.stiefel import orthogonality_error
from rotexp.rotation.invariance import check_invariance, check_merged, trace
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.mode import BROKEN
from rotexp.rotation.model import RotatedModel, Trace
from rotexp.rotation.norms import trains_norms
from rotexp.sharding.communication import Communication

LIMIT = 1e-3
"""Largest max|R Rᵀ − I| of a rotation that may be merged; what CayleySGD leaves stays a hundred times below it."""


def prepare_and_prove(
    model: RotatedModel, token_ids: Tensor, *, dtype: torch.dtype, communication: Communication
) -> tuple[Trace, float]:
    """Fold norms, bake online transforms, and prove that rotating changes nothing; the model keeps the proof.

    Args:
        token_ids: (batch, tokens), the same on every rank.
        dtype: of the weights that are computed with, which decides the limit.

    Returns:
        What the float model computed before, and the relative error of the rotated model's logits.

    Raises:
        ValueError: a norm cannot be folded.
        ArithmeticError: the rotated model computes something else; the model is of no use any more.
    """
    original = trace(model, token_ids, rotate=False)
    with communication.equal_threads():  # lest replicas of what is baked differ in their last bits
        prepare(model)
    try:
        rotated = trace(model, token_ids, rotate=True)
        error = check_invariance(original, rotated, layers=model.spec.layers, dtype=dtype)
    except BaseException:
        model.mode.refusal = BROKEN
        raise
    model.proof = original
    return original, error


def merge_and_prove(model: RotatedModel, original: Trace, *, dtype: torch.dtype, weights_trained: bool) -> float:
    """Bake the rotations into the weights, and prove that the merged model computes what the float model did.

    Args:
        original: of `prepare_and_prove`.
        dtype: as there.
        weights_trained: whether the float model is another one by now, whose rotated form the merge is held against.

    Returns:
        The relative error of the logits.

    Raises:
        ValueError: norms were trained without having been declared so, and nothing has changed.
        ArithmeticError: a rotation is not orthogonal, and nothing has changed; or the merged model computes something
            else, and is of no use any more.
    """
    _check_norms(model)
    _check_orthogonal(model)
    expected = trace(model, original.token_ids, rotate=True) if weights_trained else original
    model.proof = None
    merge(model)
    error = check_merged(expected, model, dtype=dtype)
    model.proof = expected
    return error


def _check_norms(model: RotatedModel) -> None:
    """Refuse gains of a stream that was not rotated: they are none of the merged model's."""
    residual = model.residual
    if residual is not None and residual.name in model.mode.within and trains_norms(model.network, model.spec):
        raise ValueError(
            "merge: norms require gradients that did not when the model was prepared, so they were trained on a "
            "residual stream that was not rotated; call requires_grad_ on them before rotexp.prepare"
        )


@torch.no_grad()
def _check_orthogonal(model: RotatedModel) -> None:
    """Refuse rotations that an optimizer has let leave orthogonality, by their names."""
    errors = {name: float(torch.stack(orthogonality_error(matrix)).max()) for name, matrix in model.bank.items()}
    far = [name for name, error in errors.items() if not error <= LIMIT]
    if far:
        raise ArithmeticError(
            f"merge: {few(far)} left orthogonality (max|R Rᵀ − I| = {errors[far[0]]:.1e}, at most {LIMIT:.0e}); "
            "train by rotexp.CayleySGD, or project each by rotexp.orthogonal.stiefel.polar_projection"
        )
