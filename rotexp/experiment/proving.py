"""The phases `prepare` and `merge`: change the weights, and prove that the float model is what it was."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.experiment.context import Context, compute_dtype
from rotexp.rotation.invariance import PROOF_TOKENS
from rotexp.rotation.model import RotatedModel, Trace
from rotexp.rotation.proof import merge_and_prove, prepare_and_prove


def prepare_model(context: Context, model: RotatedModel) -> Trace:
    """Fold norms and bake online transforms.

    Returns:
        What the float model computed before.

    Raises:
        ArithmeticError: it does not compute it any more.
    """
    for warning in model.warnings:
        context.messages.warn(warning)
    original, error = prepare_and_prove(
        model, _proof_tokens(context), dtype=compute_dtype(context.config), communication=context.communication
    )
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
    trained = context.config.train.params.weights
    merge_and_prove(model, original, dtype=compute_dtype(context.config), weights_trained=trained)


def _proof_tokens(context: Context) -> Tensor:
    """Return the token ids (1, tokens) that the proofs run on."""
    return torch.from_numpy(context.inputs.calibration[:1, :PROOF_TOKENS]).to(context.device)
