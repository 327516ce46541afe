"""The options of quantization: which tensors are quantized, and how often clip ratios are searched."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rotexp.errors.requirements import MISSING, require
from rotexp.quant.spec import QuantSpec


class Products(Enum):
    """How a quantized activation and a quantized weight are multiplied."""

    auto = "auto"
    float = "float"


@dataclass(frozen=True)
class QuantConfig:
    """What is quantized: decoder-layer weights, the inputs of those weights, keys and values.

    Attributes:
        name: what tables and W&B call the option that was chosen.
        refresh_every: training steps after which clip ratios that are searched are searched anew.
        products: how quantized activations and weights are multiplied. `auto` multiplies their codes as integers where
            both have one scale a row and codes of int8, the model is float32 or bfloat16, and the CPU has AVX-512 VNNI
            (each process looks at its own); elsewhere, and always with `float`, their values are multiplied.
    """

    name: str = MISSING
    weights: QuantSpec = field(default_factory=QuantSpec)
    activations: QuantSpec = field(default_factory=QuantSpec)
    kv: QuantSpec = field(default_factory=QuantSpec)
    refresh_every: int = 10
    products: Products = Products.auto

    @property
    def enabled(self) -> bool:
        """Whether anything is quantized."""
        return self.weights.enabled or self.activations.enabled or self.kv.enabled

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        for name in ("weights", "activations", "kv"):
            getattr(self, name).validate(f"quant.{name}")
        require(self.refresh_every >= 1, "quant.refresh_every", self.refresh_every, "at least 1", "1 is every step")
        for name in ("activations", "kv"):
            search = getattr(self, name).clip_search
            require(
                not search, f"quant.{name}.clip_search", search, "false", "only quant.weights.clip_search can be true"
            )
