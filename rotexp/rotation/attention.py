"""Attention whose keys and values are fake-quantized where a cache would hold them: after RoPE, per token and head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.mode import Mode

IMPLEMENTATION = "rotexp"
"""The name under which transformers finds this attention."""


class CacheQuantizer:
    """What an attention module's keys and values pass through; attached to the module, not registered."""

    def __init__(self, quantizer: FakeQuantizer, *, mode: Mode) -> None:
        self.quantizer = quantizer
        self.mode = mode

    def __call__(self, states: Tensor) -> Tensor:
        """Fake-quantize states: (batch, heads, tokens, head_dim)."""
        return self.quantizer(states) if self.mode.quantize else states


def quantized_cache_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Scaled dot-product attention over what a quantized cache would give back."""
    cache: Any = module.cache_quantizer
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, cache(key), cache(value), attention_mask, **options
    )
    return attended


def quantize_cache(model: Any, attention_modules: list[nn.Module], *, quantizer: FakeQuantizer, mode: Mode) -> None:
    """Make `attention_modules` of a Hugging Face model attend over quantized keys and values."""
    AttentionInterface.register(IMPLEMENTATION, quantized_cache_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    for module in attention_modules:
        module.cache_quantizer = CacheQuantizer(quantizer, mode=mode)  # type: ignore[assignment]
    model.config._attn_implementation = IMPLEMENTATION
