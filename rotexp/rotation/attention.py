"""Attention whose queries and keys are rotated after RoPE (R3), and whose keys and values are fake-quantized.

Both happen where a cache would hold keys and values: after RoPE, per token and head.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rotexp.orthogonal.hadamard import HadamardTransform
from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.mode import Mode

PREFIX = "rotexp_"
"""Before the name of the attention that computes the product, the name under which transformers finds ours."""


class Cache:
    """What an attention module's queries, keys and values pass through; attached to the module, not registered.

    Attributes:
        rotation: R3, a Hadamard transform of each head, or None.
    """

    def __init__(self, quantizer: FakeQuantizer, *, mode: Mode, rotation: HadamardTransform | None) -> None:
        self.quantizer = quantizer
        self.mode = mode
        self.rotation = rotation

    def rotate(self, states: Tensor) -> Tensor:
        """Rotate queries or keys: (batch, heads, tokens, head_dim)."""
        return states if self.rotation is None or not self.mode.rotate else self.rotation(states)

    def quantize(self, states: Tensor) -> Tensor:
        """Fake-quantize keys or values: (batch, heads, tokens, head_dim)."""
        return self.quantizer(states) if self.mode.quantize else states


def cached_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """Attend over what a quantized cache would give back."""
    cache: Any = module.cache
    keys, values = cache.quantize(cache.rotate(key)), cache.quantize(value)
    config: Any = module.config
    attend = _attention(module, config._attn_implementation.removeprefix(PREFIX))
    return attend(module, cache.rotate(query), keys, values, attention_mask, **options)


def _attention(module: nn.Module, implementation: str) -> Any:
    """Return transformers' attention of that name; `eager` is each model's own."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return own if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]


def cache_obstacle(model: Any) -> str | None:
    """Return why queries, keys and values of a Hugging Face model cannot be reached, or None if they can."""
    if model._supports_attention_backend:
        return None
    return f"{type(model).__name__} does not look its attention up in transformers' registry, where it could be reached"


def place_cache(model: Any, attention_modules: list[nn.Module], cache: Cache) -> None:
    """Make `attention_modules` of a Hugging Face model attend through `cache`."""
    implementation = model.config._attn_implementation
    AttentionInterface.register(PREFIX + implementation, cached_attention)
    AttentionMaskInterface.register(PREFIX + implementation, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    for module in attention_modules:
        module.cache = cache  # type: ignore[assignment]
    model.config._attn_implementation = PREFIX + implementation
