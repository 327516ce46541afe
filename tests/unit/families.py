"""Small models of every family, every parameter random, as Hugging Face makes them and with rotations placed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotexp.models.arch import find_spec
from rotexp.quant.options import QuantConfig
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place
from rotexp.rotation.readout import FinalStates, Readout, read

HIDDEN, INNER, HEADS, HEAD_DIM, VOCABULARY, LAYERS = 48, 56, 4, 12, 61, 2
BLOCK = 4
"""A block size that divides every width of these models."""

SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
UNGROUPED = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
OPT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "ffn_dim": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": HIDDEN,
}
GPTJ: dict[str, Any] = {
    "n_embd": HIDDEN,
    "n_inner": INNER,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
}
HALF_ROTARY = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A small model of a family.

    Attributes:
        config_class: name of its config's class in transformers.
        options: what that class is given.
        norm: `rms`, `layer` (which subtracts the mean), or why R1 cannot act, as a pattern of the message.
        reachable: whether its attention can be reached, for R3 and quantized keys and values.
    """

    config_class: str
    options: dict[str, Any]
    norm: str = "rms"
    reachable: bool = True

    @property
    def has_r1(self) -> bool:
        """Whether R1 can act."""
        return self.norm in ("rms", "layer")

    def config(self, **changes: Any) -> Any:
        """Return a new Hugging Face config."""
        return getattr(transformers, self.config_class)(**copy.deepcopy(self.options) | changes)


POST_NORMS = r"post_\w+ and post_\w+ have a gain between a writer and the residual stream"
FAMILIES = {
    "llama": Family("LlamaConfig", SHAPE),
    "llama with biases": Family("LlamaConfig", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "mistral": Family("MistralConfig", SHAPE | {"sliding_window": 4}),
    "ministral": Family("MinistralConfig", SHAPE | SLIDING | {"head_dim": HEAD_DIM}),
    "qwen2": Family("Qwen2Config", SHAPE | {"tie_word_embeddings": True}),
    "qwen3 with wide heads": Family("Qwen3Config", SHAPE | {"head_dim": 20}),
    "gemma": Family("GemmaConfig", SHAPE | {"head_dim": 16, "attention_bias": True}),
    "gemma2 with binding caps": Family(
        "Gemma2Config",
        SHAPE
        | SLIDING
        | {"head_dim": 16, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
        POST_NORMS,
    ),
    "gemma3 with sliding layers": Family("Gemma3TextConfig", SHAPE | SLIDING | {"head_dim": 16}, POST_NORMS),
    "granite": Family(
        "GraniteConfig",
        SHAPE
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "smollm3": Family("SmolLM3Config", SHAPE),
    "glm": Family("GlmConfig", SHAPE | {"head_dim": 12, "attention_bias": True}),
    "glm4": Family("Glm4Config", SHAPE | {"head_dim": 12}, POST_NORMS),
    "phi3": Family("Phi3Config", SHAPE),
    "phi3 with partial rotary": Family("Phi3Config", SHAPE | {"rope_parameters": HALF_ROTARY}),
    "olmo2": Family("Olmo2Config", SHAPE, POST_NORMS),
    "olmo3 with sliding layers": Family("Olmo3Config", SHAPE | SLIDING, POST_NORMS),
    "mixtral": Family("MixtralConfig", SHAPE | {"num_local_experts": 5}),
    "qwen2_moe": Family("Qwen2MoeConfig", SHAPE | EXPERTS | {"shared_expert_intermediate_size": 28}),
    "qwen3_moe with a dense layer": Family(
        "Qwen3MoeConfig", SHAPE | EXPERTS | {"head_dim": 12, "mlp_only_layers": [0]}
    ),
    "olmo": Family("OlmoConfig", SHAPE, "layer"),
    "cohere": Family("CohereConfig", SHAPE | {"use_qk_norm": True, "logit_scale": 0.25}, "layer"),
    "cohere2": Family("Cohere2Config", SHAPE | SLIDING, "layer"),
    "nemotron": Family("NemotronConfig", SHAPE | {"rope_parameters": HALF_ROTARY}, "layer"),
    "stablelm": Family(
        "StableLmConfig", SHAPE | {"use_qkv_bias": True, "rope_parameters": HALF_ROTARY}, "layer", reachable=False
    ),
    "starcoder2": Family("Starcoder2Config", SHAPE, "layer"),
    "phi": Family("PhiConfig", SHAPE | {"qk_layernorm": True, "rope_parameters": HALF_ROTARY}, "layer"),
    "opt": Family("OPTConfig", OPT, "layer"),
    "opt without biases and gains": Family(
        "OPTConfig", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}, "layer"
    ),
    "opt with norms behind": Family("OPTConfig", OPT | {"do_layer_norm_before": False}, "norms stand behind"),
    "opt with narrow embeddings": Family(
        "OPTConfig",
        OPT | {"word_embed_proj_dim": 16},
        r"embeddings \(model\.decoder\.embed_tokens\) are 16 wide, its residual stream 48",
    ),
    "gpt_neox": Family("GPTNeoXConfig", UNGROUPED | {"rope_parameters": HALF_ROTARY}, "layer"),
    "gpt_neox in sequence": Family(
        "GPTNeoXConfig",
        UNGROUPED | {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": HALF_ROTARY},
        "layer",
    ),
    "gptj": Family("GPTJConfig", GPTJ, "layer"),
}

REACHABLE = [name for name, family in FAMILIES.items() if family.reachable]
WITH_R1 = [name for name, family in FAMILIES.items() if family.has_r1]
WITHOUT_R1 = [name for name, family in FAMILIES.items() if not family.has_r1]
WITH_LAYER_NORM = [name for name, family in FAMILIES.items() if family.norm == "layer"]

WANTED: dict[str, Callable[[Family], RotationConfig]] = {
    "r1": lambda family: RotationConfig(r1=family.has_r1, r2=False),
    "r2": lambda _: RotationConfig(r1=False, r2=True),
    "r3": lambda family: RotationConfig(r1=False, r2=False, r3=family.reachable),
    "r4": lambda _: RotationConfig(r1=False, r2=False, r4=True),
    "all": lambda family: RotationConfig(r1=family.has_r1, r2=True, r3=family.reachable, r4=True),
    "blocks": lambda family: RotationConfig(r1=family.has_r1, r2=True, r3=family.reachable, r4=True, block_size=BLOCK),
}
"""Each rotation alone and all of them, as far as a family lets them exist."""


def wanted(name: str, placement: str) -> RotationConfig:
    """Return a placement for a family."""
    return WANTED[placement](FAMILIES[name])


def make_source(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """Return the Hugging Face model of a family, every parameter random."""
    return from_config(FAMILIES[name].config(**changes), dtype=dtype, seed=seed)


@torch.no_grad()
def from_config(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a Hugging Face model, frozen; fresh ones have no biases and unit gains, which would hide folding bugs."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings or "embed_positions" in name:
            parameter.normal_(mean=0.3, generator=generator)  # a mean, so that centring it matters
        elif "bias" in name:
            parameter.normal_(std=0.5, generator=generator)
        elif parameter.ndim == 1 or "norm" in name or "ln_" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def rotated(
    source: Any,
    rotation: RotationConfig | None = None,
    quant: QuantConfig | None = None,
    *,
    ready: bool = True,
    seed: int = 0,
) -> RotatedModel:
    """Return a copy of a source model with rotations and quantizers placed; `ready` also prepares it."""
    network = copy.deepcopy(source)
    model = place(network, find_spec(network), rotation or RotationConfig(), quant or QuantConfig(), seed=seed)
    if ready:
        prepare(model)
    return model


def make_token_ids(*, rows: int = 2, tokens: int = 10, seed: int = 5) -> Tensor:
    """Return token ids (rows, tokens); none is padding or the end of a text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)


def logits(model: RotatedModel, token_ids: Tensor, *, rotate: bool = True, quantize: bool = False) -> Tensor:
    """Return what a placed model computes in a mode."""
    with torch.no_grad(), model.mode.set(rotate=rotate, quantize=quantize):
        return model.logits(token_ids)


@torch.no_grad()
def measure(
    model: RotatedModel,
    token_ids: Tensor,
    figures: Callable[[Sequence[Tensor], slice], Tensor],
    *,
    beside: Sequence[FinalStates] = (),
) -> tuple[Tensor, FinalStates]:
    """Return figures of the logits of every token, in chunks, and of states beside; and the final states."""
    found: list[tuple[Tensor, FinalStates]] = []  # beside what the network returns, which a policy may cast

    def work(readout: Readout) -> Tensor:
        inputs = [readout.inputs(), *map(readout.inputs, beside)]
        chunks = [
            figures([readout.finish(readout.project(each[rows])).float() for each in inputs], rows)
            for rows in readout.chunks()
        ]
        found.append((torch.unflatten(torch.cat(chunks), 0, token_ids.shape), readout.states))
        return found[0][0]

    read(model, token_ids, work)
    return found[0]
