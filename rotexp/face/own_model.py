"""Rotate and quantize a Hugging Face model of the user's own, in memory and in the user's own training loop."""

from __future__ import annotations

import copy
import warnings
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rotexp.errors.requirements import MISSING
from rotexp.errors.wording import dtype_name, few
from rotexp.face.configs import load_config
from rotexp.models.arch import find_spec
from rotexp.quant.options import QuantConfig
from rotexp.rotation import merge as merging
from rotexp.rotation import placement
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.invariance import LIMITS, check_invariance, check_merged, proof_tokens, trace
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig

Options = TypeVar("Options", RotationConfig, QuantConfig)


def place(
    model: nn.Module,
    *,
    rotation: RotationConfig | str = "learned",
    quant: QuantConfig | str = "w4a4",
    seed: int = 0,
) -> RotatedModel:
    """Put rotations and quantizers into a causal Hugging Face model, in place; weights keep their names.

    Until `placed.mode` says otherwise it computes what it did. A tied head gets a weight of its own where the residual
    stream is rotated, with a warning; every parameter is frozen but the rotations, which lie on the weights' device.

    Args:
        model: as `AutoModelForCausalLM` returns it, float32, bfloat16 or float16, on one device, not sharded yet.
        rotation: an option of the group `rotation`, such as `learned_r4`, or a `RotationConfig` with a name.
        quant: an option of the group `quant`, such as `w4a8`, or a `QuantConfig` with a name.
        seed: of the rotations' start.

    Returns:
        The model with its `bank` of rotations (float32 parameters) and its `mode`.

    Raises:
        ValueError: in one line why this model, or these options, cannot be used; the model is as it was then.
    """
    _check_model(model)
    spec = find_spec(model)
    turned, quantized = _options("rotation", rotation, RotationConfig), _options("quant", quant, QuantConfig)
    if turned.path is not None:
        raise ValueError(f"rotation.path={turned.path}: is a run's; here give matrices to placed.bank.assign")
    placement.place(_structure(model), spec, turned, quantized, seed=seed).check_widths()  # before anything changes
    device = next(model.parameters()).device
    model.requires_grad_(False)
    placed = placement.place(model, spec, turned, quantized, seed=seed)
    placed.bank.to(device)
    for warning in (*placed.warnings, *_untied(placed)):
        warnings.warn(warning, stacklevel=2)
    return placed


def prepare(placed: RotatedModel, token_ids: Tensor | None = None) -> float:
    """Fold norms and bake online transforms, and prove that the unquantized rotated model computes what the model did.

    To be called once, before training, after sharding if the model is sharded. Train inside of
    `placed.mode.set(rotate=True, quantize=True)`, and call `placed.refresh_quantizers()` every few steps, since the
    weights' clip ratios are kept until then.

    Args:
        token_ids: of the proof, (batch, tokens), the same on every rank (None: 64 random ones).

    Returns:
        The relative error of the logits.

    Raises:
        ValueError: the model is prepared already, or a norm cannot be folded.
        ArithmeticError: the error is too large.
    """
    if placed.prepared:
        raise ValueError("prepare: the model is prepared already; call it once, before training")
    token_ids = proof_tokens(placed.network) if token_ids is None else token_ids
    original = trace(placed, token_ids, rotate=False)
    merging.prepare(placed)
    rotated = trace(placed, token_ids, rotate=True)
    return check_invariance(original, rotated, layers=placed.spec.layers, dtype=_computed(placed, token_ids))


def merge(placed: RotatedModel, token_ids: Tensor | None = None) -> float:
    """Bake the rotations into the weights, and prove that the unquantized model computes what it did before.

    The bank is empty afterwards; transforms of `placed.online` stay online. `rotexp.export(placed, path)` saves it.

    Args:
        token_ids: as for `prepare`.

    Returns:
        The relative error of the logits.

    Raises:
        ValueError: the model is not prepared.
        ArithmeticError: the error is too large.
    """
    if not placed.prepared:
        raise ValueError("merge: norms are not folded yet; call rotexp.prepare(placed) before training")
    token_ids = proof_tokens(placed.network) if token_ids is None else token_ids
    before = trace(placed, token_ids, rotate=True)
    placed.network.requires_grad_(False)
    merging.merge(placed)
    return check_merged(before, placed, token_ids, dtype=_computed(placed, token_ids))


def _check_model(model: nn.Module) -> None:
    """Refuse what is no whole causal model on one device.

    Raises:
        ValueError: one line with what to do.
    """
    if isinstance(model, RotatedModel) or any(isinstance(module, RotationBank) for module in model.modules()):
        raise ValueError("place: rotations are placed in this model already; place once, or load the model anew")
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "model_type"):
        raise ValueError(f"place: {type(model).__name__} is no Hugging Face model; load one by AutoModelForCausalLM")
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise ValueError(f"place: {type(model).__name__} has no head for tokens; load it by AutoModelForCausalLM")
    tensors = dict(model.named_parameters())
    sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if sharded or any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"place: the model is sharded already ({few(sharded, most=1)}); place first, then fully_shard each of "
            f"placed.units and placed.network with ignored_params=placed.unsharded"
        )
    if absent := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"place: {few(absent, most=1)} are on the meta device or offloaded; load the weights first")
    if len(devices := {str(tensor.device) for tensor in tensors.values()}) > 1:
        raise ValueError(f"place: parameters are on {', '.join(sorted(devices))}; move the model to one device")
    allowed = ", ".join(dtype_name(dtype) for dtype in LIMITS)
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype not in LIMITS]:
        found = dtype_name(tensors[wrong[0]].dtype)
        raise ValueError(f"place: {wrong[0]} is {found}; load the weights unquantized, in one of {allowed}")


def _structure(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters take no memory."""
    empty = {id(weight): nn.Parameter(weight.detach().to("meta"), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, empty)


def _options(group: str, given: Options | str, kind: type[Options]) -> Options:
    """Return the options of a group that were given, or that an option's name stands for.

    Raises:
        ValueError: there is no such option, or none was chosen.
    """
    if isinstance(given, str):
        options: Options = getattr(load_config([f"{group}={given}", "train.steps=0"]), group)
        return options
    if not isinstance(given, kind):
        raise ValueError(f"{group}={given!r}: must be the name of an option, or a {kind.__name__}; give one of them")
    if given.name == MISSING:
        remedy = f"name an option, as in rotexp.place(model, {group}=…), or give {kind.__name__} a name"
        raise ValueError(f"{group}: {kind.__name__} has no name, as in a Config() without groups; {remedy}")
    given.validate()
    return given


def _untied(placed: RotatedModel) -> list[str]:
    if placed.untied is None:
        return []
    weight = placed.network.get_parameter(placed.untied)
    more = weight.numel() * weight.element_size() / 2**20
    return [
        f"{placed.untied} was the embedding's and has a weight of its own now ({more:.0f} MiB more), since R1 turns "
        f"the two in two ways; r1=False in a RotationConfig keeps them tied"
    ]


def _computed(placed: RotatedModel, token_ids: Tensor) -> torch.dtype:
    """Return in what the model computes, which sharding may choose."""
    with torch.no_grad(), placed.mode.set(rotate=False, quantize=False):
        return placed.logits(token_ids[:1, :1]).dtype
