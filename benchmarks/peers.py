"""Other people's software that does the same work, imported only when it is measured and never needed."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.facts import NOT_INSTALLED

BREVITAS = "brevitas w4a4"

BREVITAS_LEARNING_RATE = 0.1
SEQUENCE_LENGTH_TO_TRACE = 32

WEIGHTS = {
    "weight_bit_width": 4,
    "weight_param_method": "mse",
    "weight_scale_precision": "float_scale",
    "weight_quant_type": "sym",
    "weight_quant_granularity": "per_channel",
    "weight_group_size": 128,
    "quantize_weight_zero_point": False,
    "weight_scaling_impl_type": "parameter_from_stats",
}
ACTIVATIONS = {
    "input_bit_width": 4,
    "input_quant_format": "int",
    "input_scale_precision": "float_scale",
    "input_scale_type": "dynamic",
    "input_param_method": "stats",
    "input_quant_type": "asym",
    "input_quant_granularity": "per_row",
    "quant_attn_mode": "sdpa",
}
"""Brevitas' options for what `conf/quant/w4a4.yaml` says: weights per channel, searched; activations per token."""


class MissingPeerError(RuntimeError):
    """A peer is not installed, or does not work with the installed versions; the message is what tables show."""


def require(module: str) -> Any:
    """Import a peer's module.

    Raises:
        MissingPeerError: it is not installed, or its import fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        own = missing.partition(".")[0] == module.partition(".")[0]
        raise MissingPeerError(NOT_INSTALLED if own else f"{NOT_INSTALLED}: {missing}") from None
    except ImportError as error:
        raise MissingPeerError(f"cannot be imported: {error}") from None


def brevitas_step(network: nn.Module, token_ids: Tensor) -> Callable[[], None]:
    """Return Brevitas' training step for R1 and R2 under W4A4: forward, backward, clip, its Cayley optimizer.

    Clip ratios are searched once, at the first forward, and then kept, as Brevitas' scaling does by default.

    Args:
        network: a Hugging Face model; it is copied.

    Raises:
        MissingPeerError: Brevitas is not installed, or does not work with the installed versions.
    """
    require("brevitas")
    parametrizations = require("brevitas.utils.parametrization_utils")
    optimizers = require("brevitas.optim.cailey_sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = _brevitas_quantized(_brevitas_rotated(network, token_ids))
        except (RuntimeError, ValueError, AttributeError, TypeError, AssertionError) as error:
            reason = " ".join(str(error).split())[:80]
            raise MissingPeerError(f"fails with these versions: {reason}") from None
    model.eval().requires_grad_(False)
    rotations = parametrizations.extract_trainable_rotation_matrices(model)
    for rotation in rotations:
        rotation.requires_grad_(True)
    optimizer = optimizers.CaileySGD(rotations, lr=BREVITAS_LEARNING_RATE, stiefel=True)
    return _training_step(model, rotations, optimizer, token_ids)


def _training_step(model: Any, rotations: list[nn.Parameter], optimizer: Any, token_ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = model(token_ids, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(rotations, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _brevitas_rotated(network: nn.Module, token_ids: Tensor) -> Any:
    """Return a copy with norms folded, and R1 and R2 as parametrizations of its weights (Hadamard start)."""
    merging = require("brevitas_examples.llm.llm_quant.ln_affine_merge")
    helpers = require("brevitas_examples.llm.llm_quant.run_utils")
    equalize = require("brevitas.graph.equalize")
    copied = copy.deepcopy(network)
    graph, norms = _brevitas_graph(copied, token_ids[:1, :SEQUENCE_LENGTH_TO_TRACE])
    merging.apply_layernorm_affine_merge(graph, norms)
    graph, rewriters = merging.apply_layernorm_to_rmsnorm(graph, return_rewriters=True)
    for rewriter in helpers.fix_rewriter(rewriters, copied, "weight"):
        rewriter.apply(copied)
    rotating = equalize.GraphRotationEqualization(
        orphan_sink=False,  # no online R4
        sdpa_regions=True,  # R2
        full_rotation_method="had",
        use_parametrized_rotations=True,
        delay_rewriters=True,
        return_rewriters=True,
        extra_state_kwargs={"scale_invariant_layers": norms},
    )
    _, rewriters = rotating.apply(graph)
    rewriters = helpers.fix_rewriter(rewriters, copied, "weight")
    return equalize.apply_rewriters(copied, rewriters, delay_rewriters=False)


def _brevitas_graph(model: Any, token_ids: Tensor) -> tuple[Any, Any]:
    """Trace a model, in whose graph Brevitas finds where rotations may act; return it and the norms' classes."""
    preparing = require("brevitas_examples.llm.llm_quant.prepare_for_quantize")
    merging = require("brevitas_examples.llm.llm_quant.ln_affine_merge")
    tracing = require("brevitas_examples.common.dynamo_utils")
    model.config.use_cache = True  # Brevitas' tracing refuses models without a cache, and then switches it off
    batch = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
    with torch.no_grad(), merging.rmsnorm_patch(model, model.config) as patcher:
        norms = patcher.rmsnorm_classes
        with preparing.make_dynamo_compatible(model) as compatible, tracing.dynamo_export_ctx():
            graph, _ = importlib.import_module("torch._dynamo").export(compatible.model)(**batch)
    return graph, norms


def _brevitas_quantized(model: Any) -> Any:
    """Replace the linears of the decoder layers by quantized ones."""
    quantizing = require("brevitas_examples.common.generative.quantize")
    parameter = next(model.parameters())
    quantizers = quantizing.generate_quantizers(**WEIGHTS, **ACTIVATIONS)
    layers = quantizing.generate_quant_maps(
        **quantizers, dtype=parameter.dtype, device=parameter.device, quantize_embedding=False
    )
    graph = require("brevitas.graph.quantize")
    return graph.layerwise_quantize(model=model, compute_layer_map=layers, name_blacklist=["lm_head"])


def riemannian_sgds(matrices: list[Tensor], *, learning_rate: float) -> dict[str, Any]:
    """Return geoopt's Riemannian SGD on copies of orthogonal matrices, by retraction.

    Args:
        matrices: (n, n) each; the copies have gradients of their own drawing, as `matrix.grad` says.

    Raises:
        MissingPeerError: geoopt is not installed.
    """
    geoopt = require("geoopt")
    manifolds = {
        "geoopt QR": geoopt.EuclideanStiefel(),
        "geoopt Cayley": geoopt.CanonicalStiefel(),
    }
    optimizers = {}
    for name, manifold in manifolds.items():
        copies = [geoopt.ManifoldParameter(matrix.detach().clone(), manifold=manifold) for matrix in matrices]
        for copied, matrix in zip(copies, matrices, strict=True):
            copied.grad = None if matrix.grad is None else matrix.grad.clone()
        optimizers[name] = geoopt.optim.RiemannianSGD(copies, lr=learning_rate)
    return optimizers
