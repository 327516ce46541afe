"""A format of numbers as its checker tries it: on groups that are drawn, by its own methods and as rotexp uses it."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.quantizer import Grid, Quantizer
from rotexp.quant.spec import QuantSpec

SIZE, COUNT = 16, 6
"""Of a group, where the format takes any, and how many are checked at once."""


class QuantizerCase:
    """A format and the dtype of the values that it is tried on."""

    def __init__(self, name: str, quantizer: Quantizer, dtype: torch.dtype) -> None:
        self.name = name
        self.quantizer = quantizer
        self.dtype = dtype
        self.size = quantizer.group_size or SIZE

    @property
    def spec(self) -> QuantSpec:
        """What a configuration says that uses it."""
        return QuantSpec(_target_=self.name, group_size=self.size)

    @property
    def fake(self) -> FakeQuantizer:
        """The format as it is used, without clip ratios."""
        return FakeQuantizer(self.spec, self.quantizer)

    def groups(self, *, seed: int = 0) -> Tensor:
        """Return groups `(COUNT, size)` of several magnitudes, with an outlier in the second."""
        generator = torch.Generator().manual_seed(seed)
        groups = torch.randn(COUNT, self.size, generator=generator, dtype=torch.float64)
        groups[1, -1] = 20.0
        return (groups * torch.logspace(-3, 2, COUNT, dtype=torch.float64)[:, None]).to(self.dtype)

    def used(self, groups: Tensor, *, clip: float = 1.0) -> tuple[Grid, Tensor, Tensor]:
        """Return the grid of groups, their codes before they are bounded, and their values."""
        clips = self.quantizer.clips or clip < 1.0
        grid = self.quantizer.grid(groups, clip)
        codes = self.quantizer.encode(groups, grid, clips=clips)
        bounded = grid.clamp(codes)
        return grid, codes, self.quantizer.decode(bounded.clone(), grid.scale)

    def require_like(self, tensor: Tensor, groups: Tensor, part: str) -> None:
        """Require shape and dtype of groups."""
        shape = tuple(tensor.shape)
        self.require(shape == groups.shape, f"{part} returns {shape} for groups of {tuple(groups.shape)}")
        self.require(tensor.dtype == groups.dtype, f"{part} returns {tensor.dtype} for values of {groups.dtype}")

    def require(self, holds: bool | Tensor, sentence: str) -> None:
        """Raise AssertionError with the sentence unless it holds."""
        require(bool(holds), self.name, sentence)


def require(holds: bool, name: str, sentence: str) -> None:
    """Raise AssertionError with the sentence, after the name of the format, unless it holds."""
    if not holds:
        raise AssertionError(f"{name}: {sentence}")
