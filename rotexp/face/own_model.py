"""Rotate and quantize a Hugging Face model of the user's own, in memory and in the user's own training loop."""

from __future__ import annotations

import copy
import warnings
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rotexp.config.components import Component, Pluggable
from rotexp.errors.requirements import MISSING
from rotexp.errors.wording import dtype_name, few
from rotexp.face.configs import checked, load_config
from rotexp.face.unmerged_save import UnmergedSave
from rotexp.models.arch import find_spec
from rotexp.quant.options import QuantConfig
from rotexp.rotation import placement
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.invariance import LIMITS, evaluating, proof_tokens
from rotexp.rotation.mode import BROKEN
from rotexp.rotation.model import RotatedModel, Trace
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.proof import merge_and_prove, prepare_and_prove
from rotexp.sharding.communication import Communication

Options = TypeVar("Options", RotationConfig, QuantConfig)


def place(
    model: nn.Module,
    *,
    rotation: RotationConfig | str = "learned",
    quant: QuantConfig | str = "w4a4",
    seed: int = 0,
) -> RotatedModel:
    """Put rotations and quantizers into a causal Hugging Face model, in place; weights keep their names.

    Until `placed.mode` says otherwise it computes what it did; it may be rotated once `rotexp.prepare` has proved that.
    A tied head gets a weight of its own where the residual stream is rotated, with a warning; every parameter is frozen
    but the rotations, which lie on the weights' device. `save_pretrained` warns until `rotexp.merge`: it writes
    `rotation_bank.*`, which transformers drops when it loads the model.

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
    if not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}: must be a whole number; give one")
    spec = find_spec(model)
    if isinstance(rotation, RotationConfig) and rotation.path is not None:
        raise ValueError(f"rotation.path={rotation.path}: is a run's; here give matrices to placed.bank.assign")
    turned, quantized = _options("rotation", rotation, RotationConfig), _options("quant", quant, QuantConfig)
    placement.place(_structure(model), spec, turned, quantized, seed=seed).check_widths()  # before anything changes
    device = next(model.parameters()).device
    model.requires_grad_(False)
    placed = placement.place(model, spec, turned, quantized, seed=seed)
    placed.bank.to(device)
    causal: Any = model
    causal.save_pretrained = UnmergedSave(model, placed.bank)
    for warning in (*placed.warnings, *_untied(placed)):
        warnings.warn(warning, stacklevel=2)
    return placed


def prepare(placed: RotatedModel, token_ids: Tensor | None = None) -> float:
    """Fold norms and bake online transforms, and prove that the unquantized rotated model computes what the model did.

    To be called once, before training, after sharding if the model is sharded. Train inside of
    `placed.mode.set(rotate=True, quantize=True)`, and call `placed.refresh_quantizers()` every few steps, since the
    weights' clip ratios are kept until then. Norms that are trained must require gradients by now.

    Args:
        token_ids: of the proof, (batch, tokens), the same on every rank (None: 64 random ones).

    Returns:
        The relative error of the logits.

    Raises:
        ValueError: the model is prepared already, a norm cannot be folded, or these are no token ids of the model.
        ArithmeticError: the error is too large.
    """
    _check_placed(placed, "prepare")
    if placed.prepared:
        _require_proof(placed, "prepare")
        raise ValueError("prepare: the model is prepared already; call it once, before training")
    token_ids = proof_tokens(placed.network) if token_ids is None else _checked_tokens(placed, token_ids)
    communication = Communication.of_world(token_ids.device)
    dtype = _computed(placed, token_ids)
    _, error = prepare_and_prove(placed, token_ids, dtype=dtype, communication=communication)
    return error


def merge(placed: RotatedModel) -> float:
    """Bake the rotations into the weights, and prove that the unquantized model computes what it did before `prepare`.

    Where weights require gradients they are taken as trained: the merged model is held against the rotated one then.
    The bank is empty afterwards; transforms of `placed.online` stay online. `rotexp.export(placed, path)` saves it.

    Returns:
        The relative error of the logits, on the tokens of `prepare`.

    Raises:
        ValueError: the model is not prepared, its proof failed, or norms require gradients only since it was prepared.
        ArithmeticError: a rotation is not orthogonal, and nothing has changed; or the error is too large.
    """
    _check_placed(placed, "merge")
    if not placed.prepared:
        raise ValueError("merge: norms are not folded yet; call rotexp.prepare(placed) before training")
    original = _require_proof(placed, "merge")
    trained, dtype = bool(placed.trained_names), _computed(placed, original.token_ids)
    error = merge_and_prove(placed, original, dtype=dtype, weights_trained=trained)
    placed.network.requires_grad_(False)
    return error


def _check_placed(placed: object, name: str) -> None:
    """Raise ValueError for what `place` did not return."""
    if not isinstance(placed, RotatedModel):
        kind = type(placed).__name__
        raise ValueError(f"{name}: {kind} is no placed model; give what rotexp.place(model) returned")


def _checked_tokens(placed: RotatedModel, token_ids: object) -> Tensor:
    """Return token ids of a proof.

    Raises:
        ValueError: they are no token ids of that model.
    """
    network: Any = placed.network
    vocabulary = network.get_input_embeddings().num_embeddings
    if not isinstance(token_ids, Tensor) or token_ids.ndim != 2 or token_ids.is_floating_point():
        found = tuple(token_ids.shape) if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise ValueError(f"token_ids: {found} are no token ids; give an integer tensor (batch, tokens)")
    if not token_ids.numel() or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocabulary:
        raise ValueError(f"token_ids: must be from 0 to {vocabulary - 1}, one at least; tokenize for this model")
    return token_ids


def _require_proof(placed: RotatedModel, name: str) -> Trace:
    """Return what the float model computes.

    Raises:
        ValueError: a proof failed, or was interrupted, so the model is no longer that model.
    """
    if placed.proof is None:
        raise ValueError(f"{name}: {BROKEN}")
    return placed.proof


def _check_model(model: nn.Module) -> None:
    """Refuse what is no whole causal model on one device.

    Raises:
        ValueError: one line with what to do.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if isinstance(model, RotatedModel) or any(isinstance(module, RotationBank) for module in modules):
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
    """Return the options of a group that were given, converted and checked, or that an option's name stands for.

    Raises:
        ValueError: there is no such option, none was chosen, or a value cannot be used.
    """
    if isinstance(given, str):
        options: Options = getattr(load_config([f"{group}={given}", "train.steps=0"]), group)
        return options
    if not isinstance(given, kind):
        raise ValueError(f"{group}={given!r}: must be the name of an option, or a {kind.__name__}; give one of them")
    if given.name == MISSING:
        remedy = f"name an option, as in rotexp.place(model, {group}=…), or give {kind.__name__} a name"
        raise ValueError(f"{group}: {kind.__name__} has no name, as in a Config() without groups; {remedy}")
    others = load_config(["train.steps=0"])
    changes: dict[str, Any] = {group: given, "plugins": _own_packages(given)}
    converted: Options = getattr(checked(replace(others, **changes)), group)
    return converted


def _own_packages(given: RotationConfig | QuantConfig) -> list[str]:
    """Return the packages of the classes that options name, which a name given in Python grants."""
    parts = [getattr(given, option.name) for option in fields(given)]
    targets = [part.target for part in parts if isinstance(part, (Component, Pluggable)) and part.target]
    return sorted({target.partition(".")[0] for target in targets} - {"rotexp"})


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
    with torch.no_grad(), evaluating(placed.network), placed.mode.set(rotate=False, quantize=False):
        return placed.logits(token_ids[:1, :1]).dtype
