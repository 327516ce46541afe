"""A model of another's config with few layers, heads and channels, every parameter random, to be run on the host."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rotexp.models.arch import ArchSpec, decoder_layers, embedding_name, head_dim, present
from rotexp.models.structure import build_network

MOST_PARAMETERS = 2**26
"""A miniature with more was not made small by what is known of its config."""

POSITIONS = VOCABULARY = 64
EXPERTS, CHOSEN = 4, 2
INNER = {
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Widths inside MLPs by their names in configs; with Hadamard matrices, which a model's own may lack."""

MOST = {"vocab_size": VOCABULARY, "num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
"""Further sizes, and the largest that a miniature has."""

STREAM = ("hidden_size", "word_embed_proj_dim", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = {*INNER, *MOST, *STREAM, "num_hidden_layers"}
"""What may differ between a model and its miniature (the width of heads does not)."""


def first_layers(model: nn.Module, spec: ArchSpec) -> int:
    """Return how many layers from the first on it takes to have one of each kind, and two."""
    kinds: dict[object, int] = {}
    for index, layer in enumerate(decoder_layers(model, spec)):
        kinds.setdefault(_kind(layer), index)
    return min(max(2, max(kinds.values()) + 1), len(decoder_layers(model, spec)))


def _kind(layer: nn.Module) -> object:
    """Return what tells layers apart: their modules, the shapes of their parameters, and their settings."""
    return tuple((name, *_traits(module)) for name, module in layer.named_modules())


def _traits(module: nn.Module) -> Iterator[object]:
    yield type(module)
    yield tuple((name, parameter.shape) for name, parameter in module.named_parameters(recurse=False))
    settings = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    yield tuple(item for item in settings.items() if item[0] != "layer_idx")


def small_config(config: Any, spec: ArchSpec, *, num_layers: int) -> Any:
    """Return a copy of a Hugging Face config with small sizes; heads keep their width, and so what depends on it."""
    small = copy.deepcopy(config)
    sizes = {name: size for name, size in INNER.items() if hasattr(config, name)}
    sizes |= {name: min(getattr(config, name), most) for name, most in MOST.items() if hasattr(config, name)}
    sizes |= _stream_sizes(config) | {"num_hidden_layers": num_layers}
    if spec.positions is not None:
        sizes["max_position_embeddings"] = min(config.max_position_embeddings, POSITIONS)
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers:
            setattr(small, name, value[:num_layers])
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(small, name, min(value, sizes["vocab_size"] - 1))
    for name, size in sizes.items():
        setattr(small, name, size)
    return small


def alternatives(config: Any) -> Iterator[tuple[str, object]]:
    """Yield another value for each simple setting of a config: its default, or a switch's other value."""
    for setting in dataclasses.fields(config):
        value, default = getattr(config, setting.name), setting.default
        simple = all(isinstance(each, (bool, int, float, str, type(None))) for each in (value, default))
        if setting.name in SIZES or not simple:
            continue
        if value != default:
            yield setting.name, default
        elif isinstance(value, bool):
            yield setting.name, not value


def let_any_host_attend(config: Any, model_class: Any) -> None:
    """Choose an attention that runs on the host where the model's is a kernel for accelerators or is compiled first."""
    chosen = config._attn_implementation or ""
    if "flash" in chosen or "flex" in chosen:
        config._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"


def _stream_sizes(config: Any) -> dict[str, int]:
    """Return few heads, grouped as they are, and a width of the stream that is that of all heads if it was."""
    width, heads = head_dim(config), config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    few = min(heads, 4 if 1 < groups < heads else 2)
    hidden = min(config.hidden_size, few * width if config.hidden_size == heads * width else 3 * width // 2)
    sizes = {"hidden_size": hidden, "num_attention_heads": few}
    if hasattr(config, "num_key_value_heads"):
        sizes["num_key_value_heads"] = min(groups, 2)
    if hasattr(config, "word_embed_proj_dim"):
        narrow = config.word_embed_proj_dim != config.hidden_size
        sizes["word_embed_proj_dim"] = hidden // 2 if narrow else hidden
    return sizes


def build_miniature(config: Any, *, seed: int) -> Any:
    """Build the Hugging Face model of a small config on the host, in float64, every parameter random.

    Raises:
        ValueError: it is not small.
    """
    model = build_network(config, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the other ones have no float64
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it still has {size} parameters")
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                drawn = _drawn(name, parameter.shape, generator=generator)
                module._parameters[name] = nn.Parameter(drawn, requires_grad=False)
    return model


def _drawn(name: str, shape: torch.Size, *, generator: torch.Generator) -> torch.Tensor:
    """Draw a parameter: gains around one, and biases and weights that keep the scale of what passes them."""
    values = torch.empty(shape, dtype=torch.float64)
    if name == "bias":
        return values.normal_(std=0.5, generator=generator)
    if len(shape) < 2:
        return values.uniform_(0.5, 1.5, generator=generator)
    return values.normal_(std=shape[-1] ** -0.5, generator=generator)


def make_louder(model: Any, spec: ArchSpec, key: str, *, factor: float) -> None:
    """Multiply what `r1` or `r2` turns, the residual stream or the values, so that limits act which rarely do."""
    layers = decoder_layers(model, spec)
    if key == "r2":
        weights = [layer.get_submodule(spec.value).get_parameter("weight") for layer in layers]
    else:
        names = [name for name in (embedding_name(model), spec.positions) if name]
        weights = [model.get_submodule(name).get_parameter("weight") for name in names]
        for layer in layers:
            weights += [layer.get_submodule(name).get_parameter("weight") for name in present(layer, spec.writers)]
            experts = present(layer, [spec.experts] if spec.experts else [])
            weights += [layer.get_submodule(name).get_parameter("down_proj") for name in experts]
    for weight in weights:
        weight.mul_(factor)


def classes_of(model: nn.Module, spec: ArchSpec, *, num_layers: int) -> dict[str, type[nn.Module]]:
    """Return the class of every module by its name, without the decoder layers from `num_layers` on."""
    left_out = {f"{spec.layers}.{index}" for index in range(num_layers, len(decoder_layers(model, spec)))}
    depth = spec.layers.count(".") + 2
    named = model.named_modules()
    return {name: type(module) for name, module in named if ".".join(name.split(".")[:depth]) not in left_out}


def changed_by_hand(model: nn.Module) -> Iterator[str]:
    """Yield each module that computes something else than its class, which is all that a miniature has of it.

    The hooks that transformers sets itself, at a first run, only keep outputs.
    """
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        own = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("transformers.")]
        if own or "forward" in vars(module):
            yield f"{name or 'the model'} has {'a hook' if own else 'a forward'} of its own, which was not judged"
