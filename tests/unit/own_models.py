"""Models as a user of `import rotexp` has them, and what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def small_model(*, dtype: torch.dtype = torch.float32, tied: bool = False, **changes: Any) -> Any:
    """Return a Llama of two layers whose norm gains are not one."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80}
    config = LlamaConfig(vocab_size=64, hidden_size=48, tie_word_embeddings=tied, **(sizes | changes))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits.double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
