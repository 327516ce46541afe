"""Sizes of published models, as their `config.json` has them, one or more of each structure."""

from __future__ import annotations

from typing import Any

import transformers


def sizes(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **others: Any) -> dict[str, Any]:
    """Return a config's sizes under the names that most have."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **others,
    }


def groups(number: int, **others: Any) -> dict[str, Any]:
    """Return how many heads of keys and values there are, and other settings."""
    return {"num_key_value_heads": number, **others}


ROPE_QUARTER = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": ("LlamaConfig", sizes(4096, 14336, 32, 32, 128256, **groups(8))),
    "Llama 3 70B": ("LlamaConfig", sizes(8192, 28672, 80, 64, 128256, **groups(8))),
    "Mistral 7B": ("MistralConfig", sizes(4096, 14336, 32, 32, 32000, **groups(8, sliding_window=4096))),
    "Qwen2.5 7B": ("Qwen2Config", sizes(3584, 18944, 28, 28, 152064, **groups(4))),
    "Qwen2 7B with a window": (
        "Qwen2Config",
        sizes(3584, 18944, 28, 28, 152064, **groups(4, use_sliding_window=True, max_window_layers=21)),
    ),
    "Qwen3 8B": ("Qwen3Config", sizes(4096, 12288, 36, 32, 151936, **groups(8, head_dim=128))),
    "Qwen3 30B A3B": (
        "Qwen3MoeConfig",
        sizes(2048, 6144, 48, 32, 151936, **groups(4, head_dim=128, num_experts=128, num_experts_per_tok=8))
        | {"moe_intermediate_size": 768},
    ),
    "Qwen1.5 MoE A2.7B": (
        "Qwen2MoeConfig",
        sizes(2048, 5632, 24, 16, 151936, **groups(16, num_experts=60, num_experts_per_tok=4))
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    "Mixtral 8x7B": (
        "MixtralConfig",
        sizes(4096, 14336, 32, 32, 32000, **groups(8, num_local_experts=8, num_experts_per_tok=2)),
    ),
    "Gemma 7B": ("GemmaConfig", sizes(3072, 24576, 28, 16, 256000, **groups(16, head_dim=256))),
    "Gemma 2 9B": ("Gemma2Config", sizes(3584, 14336, 42, 16, 256000, **groups(8, head_dim=256))),
    "Gemma 2 27B": ("Gemma2Config", sizes(4608, 36864, 46, 32, 256000, **groups(16, head_dim=128))),
    "Gemma 3 4B": ("Gemma3TextConfig", sizes(2560, 10240, 34, 8, 262208, **groups(4, head_dim=256))),
    "Gemma 3 12B": ("Gemma3TextConfig", sizes(3840, 15360, 48, 16, 262208, **groups(8, head_dim=256))),
    "Granite 3 8B": ("GraniteConfig", sizes(4096, 12800, 40, 32, 49155, **groups(8))),
    "SmolLM3 3B": ("SmolLM3Config", sizes(2048, 11008, 36, 16, 128256, **groups(4))),
    "GLM-4 9B": ("GlmConfig", sizes(4096, 13696, 40, 32, 151552, **groups(2, head_dim=128))),
    "GLM-4 9B 0414": ("Glm4Config", sizes(4096, 13696, 40, 32, 151552, **groups(2, head_dim=128))),
    "Phi-3 mini": ("Phi3Config", sizes(3072, 8192, 32, 32, 32064, **groups(32))),
    "Phi-2": (
        "PhiConfig",
        sizes(2560, 10240, 32, 32, 51200, rope_parameters=ROPE_QUARTER | {"partial_rotary_factor": 0.4}),
    ),
    "OLMo 7B": ("OlmoConfig", sizes(4096, 11008, 32, 32, 50304)),
    "OLMo 2 7B": ("Olmo2Config", sizes(4096, 11008, 32, 32, 100352)),
    "OLMo 3 7B": ("Olmo3Config", sizes(4096, 11008, 32, 32, 100278)),
    "StableLM 2 1.6B": (
        "StableLmConfig",
        sizes(2048, 5632, 24, 32, 100352, **groups(32, rope_parameters=ROPE_QUARTER)),
    ),
    "Nemotron Minitron 4B": ("NemotronConfig", sizes(3072, 9216, 32, 24, 256000, **groups(8, head_dim=128))),
    "Command R": ("CohereConfig", sizes(8192, 22528, 40, 64, 256000, **groups(64))),
    "Command R7B": ("Cohere2Config", sizes(4096, 14336, 32, 32, 256000, **groups(8))),
    "StarCoder2 7B": ("Starcoder2Config", sizes(4608, 18432, 32, 36, 49152, **groups(4))),
    "GPT-NeoX 20B": ("GPTNeoXConfig", sizes(6144, 24576, 44, 64, 50432, rope_parameters=ROPE_QUARTER)),
    "OPT 6.7B": (
        "OPTConfig",
        {
            "hidden_size": 4096,
            "ffn_dim": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 50272,
            "word_embed_proj_dim": 4096,
        },
    ),
    "GPT-J 6B": (
        "GPTJConfig",
        {"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "rotary_dim": 64, "vocab_size": 50400},
    ),
}


def published_config(name: str) -> Any:
    """Return a new Hugging Face config of a published model's sizes."""
    config_class, options = PUBLISHED[name]
    return getattr(transformers, config_class)(**options)
