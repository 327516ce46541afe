"""A model's structure with few layers, heads and channels, every parameter random, small enough to be run on the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rotexp.models.arch import ArchSpec, decoder_layers, embedding_name, head_dim, present
from rotexp.models.structure import build_network

MOST_PARAMETERS = 2**24
"""A miniature with more was not made small by what is known of its config."""

VOCABULARY, INNER, EXPERTS, CHOSEN = 64, 64, 4, 2
SMALL = {
    "vocab_size": VOCABULARY,
    "intermediate_size": INNER,
    "ffn_dim": INNER,
    "n_inner": INNER,
    "moe_intermediate_size": INNER // 2,
    "shared_expert_intermediate_size": INNER // 2,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "word_embed_proj_dim": INNER,
}
"""Sizes of a config that say nothing of what its model computes, and the largest that a miniature has."""

SIZES = {*SMALL, "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"}
"""All sizes of which a miniature has its own; the head's width stays."""


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
    """Return a copy of a Hugging Face config with small sizes; heads keep their width, and so their positions' options."""
    small, layers = copy.deepcopy(config), config.num_hidden_layers
    for name, size in SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(small, name, min(getattr(config, name), size))
    width, heads = head_dim(config), config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    small.num_attention_heads = min(heads, 4 if 1 < groups < heads else 2)
    if hasattr(config, "num_key_value_heads"):
        small.num_key_value_heads = min(groups, 2)
    square = config.hidden_size == heads * width
    hidden = small.num_attention_heads * width
    small.hidden_size = min(config.hidden_size, hidden if square else 3 * hidden // 2)
    if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
        small.word_embed_proj_dim = small.hidden_size
    if spec.positions is not None:
        small.max_position_embeddings = min(config.max_position_embeddings, VOCABULARY)
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(small, name, value[:num_layers])
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(small, name, min(value, small.vocab_size - 1))
    small.num_hidden_layers = num_layers
    return small


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
    elif key == "r1":
        names = [name for name in (embedding_name(model), spec.positions) if name]
        weights = [model.get_submodule(name).get_parameter("weight") for name in names]
        for layer in layers:
            weights += [layer.get_submodule(name).get_parameter("weight") for name in present(layer, spec.writers)]
            experts = present(layer, [spec.experts] if spec.experts else [])
            weights += [layer.get_submodule(name).get_parameter("down_proj") for name in experts]
    else:
        weights = []
    for weight in weights:
        weight.mul_(factor)


def classes_of(model: nn.Module, spec: ArchSpec, *, num_layers: int) -> dict[str, type[nn.Module]]:
    """Return the class of every module by its name, without the decoder layers from `num_layers` on."""
    left_out = {f"{spec.layers}.{index}" for index in range(num_layers, len(decoder_layers(model, spec)))}
    depth = spec.layers.count(".") + 2
    named = model.named_modules()
    return {name: type(module) for name, module in named if ".".join(name.split(".")[:depth]) not in left_out}
