"""What the ranks of the family tests do: shard, prepare, differentiate and merge models, beside the whole ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from families import FAMILIES, from_config, logits, make_token_ids, rotated
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotexp.models.arch import find_spec
from rotexp.models.materialize import materialize
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.placement import place
from rotexp.sharding.applying import shard
from rotexp.sharding.options import ShardingConfig

HIDDEN, INNER, EXPERTS = 45, 60, 3
"""Widths and a count that neither 2 nor 4 ranks share evenly; 4 ranks are more than there are experts."""

WIDE: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 12}
CHANGES: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": HIDDEN,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": INNER,
        "num_attention_heads": 5,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 5},
    "phi3": WIDE,
    "mixtral": WIDE | {"num_local_experts": EXPERTS},
    "qwen2": WIDE | {"tie_word_embeddings": True},
    "gemma": WIDE,
}
ROTATION = RotationConfig(r1=True, r2=True, r3=None, r4=True, init=RotationInit.random)
ASYMMETRIC = QuantSpec(4, symmetric=False)
WEIGHTS = QuantSpec(4, symmetric=True, clip_search=True)
QUANTS = {
    "w4a4kv4": QuantConfig(weights=WEIGHTS, activations=ASYMMETRIC, kv=ASYMMETRIC),
    "w16a4": QuantConfig(activations=ASYMMETRIC),
}
"""Those of the same names: the default but for the cache, and rotations within the quantizers of inputs."""


@dataclass(frozen=True)
class Loaded:
    """Weights that lie in memory, as `materialize` reads them."""

    weights: dict[str, Tensor]

    def read(self, name: str, rows: slice) -> Tensor:
        return self.weights[name][rows]


def make_source(name: str) -> Any:
    source = from_config(FAMILIES[name].config(**CHANGES[name]))
    source.set_experts_implementation("eager")  # the other ones need widths that are multiples of 4
    return source


def load_sharded(source: Any, strategy: str, quant: QuantConfig, **options: Any) -> tuple[RotatedModel, Any]:
    """Build a source model anew without memory, place, shard (with more options of sharding), and read it, as a run."""
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(source.config).eval().requires_grad_(False)
    model = place(network, find_spec(network), ROTATION, quant, seed=0)
    effective = shard(
        network,
        ShardingConfig(strategy, **options),
        units=model.units,
        ignored=set(model.bank.parameters()),
        device_type="cpu",
        world_size=dist.get_world_size(),
    )
    weights = dict(source.named_parameters(remove_duplicate=False))
    checkpoint: Any = Loaded(weights)
    materialize(network, checkpoint, device=torch.device("cpu"), added=model.added)
    return model, effective


def gradients(model: RotatedModel, token_ids: Tensor) -> dict[str, Tensor]:
    """Return the rotations' gradients of the quantized model's loss."""
    with model.mode.set(rotate=True, quantize=True):
        model.logits(token_ids).square().mean().backward()
    return {name: matrix.grad for name, matrix in model.bank.items() if matrix.grad is not None}


def compare(name: str, strategy: str, quant: QuantConfig) -> dict[str, Any]:
    """Return how far a sharded model is from its source, and its gradients from the whole model's."""
    source, token_ids = make_source(name), make_token_ids()
    original = source(token_ids, use_cache=False).logits
    expected = gradients(rotated(source, ROTATION, quant), token_ids)
    model, effective = load_sharded(source, strategy, quant)
    errors = {"loaded": relative_error(original, logits(model, token_ids, rotate=False))}
    prepare(model)
    errors["prepared"] = relative_error(original, logits(model, token_ids))
    found = gradients(model, token_ids)
    errors["gradients"] = max(relative_error(gradient, found[key]) for key, gradient in expected.items())
    quantized = logits(model, token_ids, quantize=True)
    merge(model)
    errors["merged"] = relative_error(original, logits(model, token_ids))
    errors["merged, quantized"] = relative_error(quantized, logits(model, token_ids, quantize=True))
    return {
        "errors": errors,
        "effect": relative_error(original, quantized),
        "rotations": sorted(expected),
        "added": len(model.added),
        "mesh": effective.mesh,
        "replicated": effective.replicated,
        "parts": effective.reduction,
    }


def compare_all(cases: list[tuple[str, str]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Compare every family in every case, a strategy and a quantization, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {(*case, name): compare(name, case[0], QUANTS[case[1]]) for case in cases for name in CHANGES}
