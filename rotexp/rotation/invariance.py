"""The proof that preparation changed nothing: unquantized, the rotated model's logits equal the original's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rotexp.models.arch import decoder_layers
from rotexp.rotation.model import RotatedModel, Trace

PROOF_TOKENS = 64
"""How many tokens the proofs run on."""

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest error of the logits by the weights' dtype, as `logit_error` measures it.

Rounding of folded and merged weights takes 1.6e-2 of bfloat16 and 2.7e-3 of float16 (the families' test models,
SmolLM2-135M), so that a fault is only seen there if it changes most tokens by more than some percent.
"""


def proof_tokens(network: nn.Module) -> Tensor:
    """Draw the token ids of a proof that has no text: (1, tokens), the same for every model of that vocabulary."""
    causal: Any = network
    weight = causal.get_input_embeddings().weight
    drawn = torch.randint(weight.shape[0], (1, PROOF_TOKENS), generator=torch.Generator().manual_seed(0))
    return drawn.to(weight.device)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Let no module drop anything at random inside the block; each has its own mode again after it."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def trace(model: RotatedModel, token_ids: Tensor, *, rotate: bool) -> Trace:
    """Run the model without quantization or dropout; a rotated residual stream is rotated back, and centred where means
    are dropped.

    Args:
        token_ids: (batch, tokens).
    """
    mode = model.mode.set(rotate=rotate, quantize=False)
    with evaluating(model.network), mode, _layer_outputs(model) as outputs:
        logits: Tensor = model.network(token_ids, use_cache=False).logits.float()
        residual = model.turned_residual
    outputs = [output if residual is None else residual.unrotate(output) for output in outputs]
    if model.rms_norms:
        outputs = [output - output.mean(-1, keepdim=True) for output in outputs]
    return Trace(token_ids, logits, outputs)


@contextmanager
def _layer_outputs(model: RotatedModel) -> Iterator[list[Tensor]]:
    outputs: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).float())

    hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model.network, model.spec)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def relative_error(original: Tensor, changed: Tensor) -> float:
    """Return max|changed − original| / max|original|."""
    return float((changed - original).abs().max() / original.abs().max())


def median_token_error(original: Tensor, changed: Tensor) -> float:
    """Return the median over tokens of ‖changed − original‖₂ / ‖original‖₂, for (batch, tokens, channels)."""
    errors = torch.linalg.vector_norm(changed - original, dim=-1) / torch.linalg.vector_norm(original, dim=-1)
    return float(errors.median())


def logit_error(original: Tensor, changed: Tensor, *, dtype: torch.dtype) -> float:
    """Return `relative_error` for float32 weights, else `median_token_error`.

    Rounded so coarsely, single tokens part without a fault: at the worst entry the bfloat16 error of a right
    preparation is 0.03 for SmolLM2-135M, and up to 0.2 where rounding sends a token to another expert.
    """
    return relative_error(original, changed) if dtype is torch.float32 else median_token_error(original, changed)


@torch.no_grad()
def check_merged(before: Trace, model: RotatedModel, *, dtype: torch.dtype) -> float:
    """Return the relative logit error of the merged model.

    Args:
        before: what the original computed; where weights were trained, the rotated model just before the merge.

    Raises:
        ArithmeticError: it exceeds the limit.
    """
    error = logit_error(before.logits, trace(model, before.token_ids, rotate=True).logits, dtype=dtype)
    limit = LIMITS[dtype]
    if not error <= limit:
        raise ArithmeticError(f"invariance: merging changed the logits by {error:.1e} relative (limit {limit:.0e})")
    return error


def check_invariance(original: Trace, prepared: Trace, *, layers: str, dtype: torch.dtype) -> float:
    """Return the relative logit error of the prepared model.

    Raises:
        ArithmeticError: it exceeds the limit; the message names the worst layer and the first that exceeds it.
    """
    error, limit = logit_error(original.logits, prepared.logits, dtype=dtype), LIMITS[dtype]
    if error <= limit:
        return error
    errors = [logit_error(*pair, dtype=dtype) for pair in zip(original.layers, prepared.layers, strict=True)]
    worst = max(range(len(errors)), key=lambda index: (math.isnan(errors[index]), errors[index]))
    first = next((index for index, value in enumerate(errors) if not value <= limit), None)
    where = "every layer is within it, so look at the head" if first is None else f"first exceeded in {layers}.{first}"
    raise ArithmeticError(
        f"invariance: rotating changed the float model's logits by {error:.1e} relative (limit {limit:.0e}); "
        f"worst layer {layers}.{worst} ({errors[worst]:.1e}); {where}"
    )
