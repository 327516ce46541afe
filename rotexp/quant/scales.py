"""The one owner of every learned quantizer scale, and the handles by which quantizers reach them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST, LARGEST = 0.1, 2.0
"""Between what a learned ratio acts; far enough from 1 that training does not meet either, where its gradient ends."""


class QuantizerScales(nn.Module):
    """Clip ratios of weight quantizers, float32 parameters (..., outputs, groups), in the order of adding.

    A group's scale is its ratio times the scale that clips nothing. Registered once, at the root of a model, and kept
    outside FSDP's parameter groups, for a ratio belongs to rows of the whole weight. Quantizers hold `LearnedRatios`.

    Attributes:
        in_use: whether quantizers take these ratios; until then they clip as their specs say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_use = False

    @torch.no_grad()
    def ratios(self) -> dict[str, Tensor]:
        """Return the ratios as they act, by the name of their weight."""
        named = self.named_parameters()
        return {name.replace("-", "."): values.clamp(LEAST, LARGEST).detach() for name, values in named}

    def add(self, weight: str, ratios: Tensor) -> LearnedRatios:
        """Take ownership of the ratios of one weight, given by its name, in which `-` then stands for every dot."""
        name = weight.replace(".", "-")
        self.register_parameter(name, nn.Parameter(ratios.detach().clone()))
        return LearnedRatios(self, name)


class LearnedRatios:
    """A handle on the ratios of one weight; not a module, so nothing registers it twice."""

    def __init__(self, scales: QuantizerScales, name: str) -> None:
        self.scales = scales
        self.name = name

    @property
    def in_use(self) -> bool:
        """Whether the quantizer is to take them."""
        return self.scales.in_use

    @property
    def values(self) -> Tensor:
        """The ratios as they act, (..., outputs, groups)."""
        return self.scales.get_parameter(self.name).clamp(LEAST, LARGEST)

    @torch.no_grad()
    def start(self, ratios: Tensor | float) -> None:
        """Let the parameter begin at these ratios, of its shape or one for all."""
        self.scales.get_parameter(self.name).copy_(torch.as_tensor(ratios))
