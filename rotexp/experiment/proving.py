"""The phases `prepare` and `merge`: change the weights, and prove that the float model is what it was."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.experiment.context import Context, compute_dtype
from rotexp.rotation.invariance import PROOF_TOKENS, Trace, check_invariance, check_merged, trace
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel


def prepare_model(context: Context, model: RotatedModel) -> Trace:
    """Fold norms and bake online transforms.

    Returns:
        What the float model computed before.

    Raises:
        ArithmeticError: it does not compute it any more.
    """
    for warning in model.warnings:
        context.messages.warn(warning)
    token_ids = _proof_tokens(context)
    original = trace(model, token_ids, rotate=False)
    with context.communication.equal_threads():  # lest replicas of what is baked differ in their last bits
        prepare(model)
    prepared = trace(model, token_ids, rotate=True)
    error = check_invariance(original, prepared, layers=model.spec.layers, dtype=compute_dtype(context.config))
    context.record.log({"eval/invariance": error})
    context.messages.say(f"invariance: relative logit error {error:.1e}")
    return original


def merge_model(context: Context, model: RotatedModel, original: Trace) -> None:
    """Bake the rotations into the weights.

    Args:
        original: what the float model computes, unless its weights were trained.

    Raises:
        ArithmeticError: the merged model does not compute it.
    """
    token_ids = _proof_tokens(context)
    if context.config.train.params.weights:
        original = trace(model, token_ids, rotate=True)
    merge(model)
    check_merged(original, model, token_ids, dtype=compute_dtype(context.config))


def _proof_tokens(context: Context) -> Tensor:
    """Return the token ids (1, tokens) that the proofs run on."""
    return torch.from_numpy(context.inputs.calibration[:1, :PROOF_TOKENS]).to(context.device)
