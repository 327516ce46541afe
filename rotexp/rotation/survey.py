"""What a rotation group would do to a model, found by placing it on the model's structure, without weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rotexp.models.arch import decoder_layers, head_dim, head_name, roles
from rotexp.models.stored_model import StoredModel
from rotexp.orthogonal.hadamard import hadamard_factors, is_constructible
from rotexp.quant.options import QuantConfig
from rotexp.rotation.building import build_placed
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.model import Consumer, RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import BANK

KEYS = ("r1", "r2", "r3", "r4")


@dataclass(frozen=True)
class RotationReport:
    """One rotation: what becomes of it (`placed…`, `off`, `left out: …`, `refused: …`), and the orders it has there.

    Where no miniature of the model could be run with it, `placed` is followed by the reason.

    Attributes:
        online: whether it stays in the merged model as a transform.
        factors: for each order, the Kronecker factors of its Hadamard matrix; None where there is none.
    """

    name: str
    outcome: str
    online: bool
    orders: tuple[int, ...] = ()
    factors: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True)
class ModuleReport:
    """What happens at one module: shape of its weight, what it is to the residual stream, its rotations and formats."""

    module: str
    shape: tuple[int, ...]
    role: str
    input: str = ""
    output: str = ""
    weights: str = ""
    activations: str = ""


@dataclass(frozen=True)
class Survey:
    """What was found.

    Attributes:
        facts: the model in figures.
        rotations: R1 to R4.
        ends: modules outside the decoder layers.
        layers: modules of the decoder layers, equal layers together: the layers' indices and their modules.
    """

    facts: dict[str, Any]
    rotations: list[RotationReport]
    ends: list[ModuleReport]
    layers: list[tuple[tuple[int, ...], list[ModuleReport]]]


def survey(checkpoint: StoredModel, rotation: RotationConfig, quant: QuantConfig, *, seed: int) -> Survey:
    """Place each rotation alone, then all that can be placed together.

    Raises:
        ValueError: the architecture is not supported, or the quantizer cannot act on it.
    """
    reports = [_report(checkpoint, rotation, key, seed=seed) for key in KEYS]
    refused: dict[str, Any] = {report.name.lower(): False for report in reports if report.outcome.startswith("refused")}
    placed = _place(checkpoint, replace(rotation, **refused), quant, seed=seed)
    placed.check_widths()
    modules = list(_modules(placed))
    prefix = f"{placed.spec.layers}."
    ends = [module for module in modules if not module.module.startswith(prefix)]
    return Survey(_facts(checkpoint, placed), reports, ends, _grouped(modules, prefix))


def _place(checkpoint: StoredModel, rotation: RotationConfig, quant: QuantConfig, *, seed: int) -> RotatedModel:
    return build_placed(checkpoint, rotation, quant, dtype=torch.float32, seed=seed)


def _report(checkpoint: StoredModel, rotation: RotationConfig, key: str, *, seed: int) -> RotationReport:
    """Place one rotation alone."""
    name, online = key.upper(), key in ("r3", "r4")
    if getattr(rotation, key) is False:
        return RotationReport(name, "off", online)
    others: dict[str, Any] = dict.fromkeys(set(KEYS) - {key}, False)
    try:
        placed = _place(checkpoint, replace(rotation, **others), QuantConfig(name="none"), seed=seed)
    except ValueError as error:
        return RotationReport(name, f"refused: {error}", online)
    left_out = [text.removeprefix(f"{name} is ") for text in placed.warnings if text.startswith(f"{name} is left out")]
    if left_out:
        return RotationReport(name, left_out[0], online)
    orders = {matrix.shape[-1] for _, matrix in placed.bank.items()} | set(placed.online.values())
    ordered = tuple(sorted(orders))
    factors = tuple(hadamard_factors(order) if is_constructible(order) else None for order in ordered)
    return RotationReport(name, "; ".join(["placed", *placed.warnings]), online, ordered, factors)


def _facts(checkpoint: StoredModel, placed: RotatedModel) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "model": checkpoint.identity,
        "model_type": config.model_type,
        "structure": placed.spec.model_types[0],
        "parameters": _num_parameters(placed.network, tied=config.tie_word_embeddings),
        "layers": len(decoder_layers(placed.network, placed.spec)),
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": head_dim(config),
        "vocabulary": config.vocab_size,
        "tied": bool(config.tie_word_embeddings),
        "norms": "LayerNorm, run as RMSNorm under R1" if placed.rms_norms else "as they are",
    }


def _num_parameters(network: nn.Module, *, tied: bool) -> int:
    """Count a model's own parameters: no rotations, and a tied head once."""
    own = {name: weight.numel() for name, weight in network.named_parameters() if not name.startswith(f"{BANK}.")}
    return sum(own.values()) - (own.get(f"{head_name(network)}.weight", 0) if tied else 0)


def _modules(placed: RotatedModel) -> Iterator[ModuleReport]:
    """Describe every module that has parameters of its own, in the model's order."""
    known = roles(placed.network, placed.spec)
    hooks = {hook.module: hook for hook in placed.hooked}
    for name, module in placed.network.named_modules():
        parameters = [(f"{name}.{own}", parameter) for own, parameter in module.named_parameters(recurse=False)]
        if parameters and parameters[0][0] in known:
            consumer = module if isinstance(module, (RotatedLinear, RotatedExperts)) else hooks.get(module)
            largest = max((parameter for _, parameter in parameters), key=torch.Tensor.numel)
            yield _describe(name, tuple(largest.shape), known[parameters[0][0]], consumer)


def _describe(name: str, shape: tuple[int, ...], role: str, consumer: Consumer | None) -> ModuleReport:
    if consumer is None:
        return ModuleReport(name, shape, role)
    if isinstance(consumer, (RotatedLinear, RotatedExperts)):
        formats = {kind: spec.label for kind, spec, _ in consumer.quantized_widths()}
        return ModuleReport(name, shape, role, *consumer.sides, **formats)
    return ModuleReport(name, shape, role, *consumer.sides)


def _grouped(modules: list[ModuleReport], prefix: str) -> list[tuple[tuple[int, ...], list[ModuleReport]]]:
    """Put layers with equal modules together; their modules are named relative to the layer."""
    layers: dict[int, list[ModuleReport]] = {}
    for module in modules:
        if module.module.startswith(prefix):
            index, _, name = module.module.removeprefix(prefix).partition(".")
            own = tuple(side.replace(f"R2_{index}", "R2") for side in (module.input, module.output))
            layers.setdefault(int(index), []).append(replace(module, module=name, input=own[0], output=own[1]))
    groups: dict[tuple[ModuleReport, ...], list[int]] = {}
    for layer, own_modules in layers.items():
        groups.setdefault(tuple(own_modules), []).append(layer)
    return [(tuple(indices), list(reports)) for reports, indices in groups.items()]
