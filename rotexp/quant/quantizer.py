"""The contract of a format of numbers, such as integers or NF4: one class, and fake quantization can use it everywhere.

A format says three things: how a group's grid follows from its values (`grid`), how values become codes (`encode`) and
how codes become values (`decode`). Grouping, gradients, clip ratios and their search, chunks, dtypes, and codes that
ranks gather are rotexp's, and the same for every format; the integers of `rotexp.quant.integers` are one of them.

One file and one YAML add a format. The file, `nf4.py`:

    class NF4(Quantizer):
        code_range = (0, 15)
        learns_clip_ratio = True

        def grid(self, groups, clip):
            return even_grid(groups.abs().amax(-1, keepdim=True) * clip, self.code_range)

        def encode(self, groups, grid, *, clips):
            ...

        def decode(self, codes, scale):
            ...

The YAML, `conf/quant/nf4.yaml`; what stands beside `_target_` is given to the class, but for `group_size`,
`clip_ratio` and `clip_search`, which mean what they mean for integers:

    name: nf4
    weights: {_target_: nf4.NF4, group_size: 64}

In a test of your own, `rotexp.testing.check_quantizer(NF4)` says what is violated. Then run

    python -m rotexp.train --config-dir conf quant=nf4 plugins=[nf4]

in the folder that holds `nf4.py`. Finished runs want `plugins=[nf4]` as well when they are evaluated or exported.
`examples/plugins/formats` has NF4 and MXFP4.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rotexp.quant.spec import QuantSpec


class Grid(NamedTuple):
    """What the codes of every group stand for; all tensors `(..., groups, 1)`, of the dtype of the values.

    Attributes:
        scale: all that decoding needs of a group.
        lowest, highest: the least and the greatest code that has a value.
    """

    scale: Tensor
    lowest: Tensor
    highest: Tensor

    def clamp(self, codes: Tensor) -> Tensor:
        """Return codes `(..., groups, group_size)` bounded, in fresh memory."""
        bounded = torch.maximum(codes, self.lowest)
        return torch.minimum(bounded, self.highest, out=bounded)

    def clamp_(self, codes: Tensor, *, margin: int = 0) -> Tensor:
        """Bound codes `(..., groups, group_size)` in place, or to so many beyond those that have values."""
        # Tensor.clamp_ with tensor bounds is not vectorized on CPU and takes ten times as long.
        torch.maximum(codes, self.lowest - margin if margin else self.lowest, out=codes)
        return torch.minimum(codes, self.highest + margin if margin else self.highest, out=codes)


class Quantizer(Protocol):
    """A format of numbers; holds no parameters, and may be copied and pickled.

    Attributes:
        code_range: the least and the greatest code that any group can have; codes are kept in int8 if they fit, and
            else in int16.
        group_size: the only one that the format has; None if it takes any.
        clips: whether values can lie outside the representable range although no clip ratio shrinks it.
        takes_clip_ratio: whether `grid` heeds clip ratios, given or searched.
        learns_clip_ratio: whether ratios can be learned: scales are proportional to the ratio, and values to the scale.
    """

    code_range: tuple[int, int]
    group_size: int | None = None
    clips: bool = False
    takes_clip_ratio: bool = True
    learns_clip_ratio: bool = False

    @abstractmethod
    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        """Derive each group's grid from its own values alone.

        A group of zeros must come back as zeros; NaN and infinity must show in their own group.

        Args:
            groups: `(..., groups, group_size)`, float32 or float64; not to be written.
            clip: the factor on the range of all groups, or of each, `(..., groups, 1)`; 1 without one.
        """
        ...

    @abstractmethod
    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        """Return codes: whole numbers in fresh memory, of the shape and dtype of `groups`.

        Each follows from its own value and its group's grid alone, so that columns can be encoded one after another.

        Args:
            groups: `(..., groups, any number)`, float32 or float64; not to be written.
            clips: whether values may lie outside the range: there codes must lie beyond the grid's `lowest` and
                `highest`, since no gradient passes; they are bounded afterwards. If False, codes must be within.
        """
        ...

    @abstractmethod
    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the values of codes, `(..., groups, any number)`, in fresh memory or in that of `codes`.

        Args:
            codes: from `lowest` to `highest` of the grid, of a floating dtype that holds them (that of `scale`, or
                the narrower one of a gathered weight, to which values are then rounded); may be overwritten.
            scale: `(..., groups, 1)`, of the grid.
        """
        ...


def even_grid(scale: Tensor, code_range: tuple[int, int]) -> Grid:
    """Return the grid of a format whose groups all have the same codes.

    Args:
        scale: `(..., groups, 1)`; one too small for a normal number becomes 1, in place.
    """
    scale = nonzero(scale)
    lowest, highest = (torch.full_like(scale, code) for code in code_range)
    return Grid(scale, lowest, highest)


def nonzero(scale: Tensor) -> Tensor:
    """Replace scales too small for a normal number by 1, in place, so that their groups become exact zeros."""
    return scale.masked_fill_(scale < torch.finfo(scale.dtype).tiny, 1.0)


def code_dtype(quantizer: Quantizer, *, clips: bool) -> torch.dtype:
    """Return the narrowest type of a format's codes, and of one code beyond them if there is clipping."""
    lowest, highest = quantizer.code_range
    narrow = torch.iinfo(torch.int8)
    fits = lowest - clips >= narrow.min and highest + clips <= narrow.max
    return torch.int8 if fits else torch.int16


def check_takes(quantizer: Quantizer, spec: QuantSpec, key: str) -> None:
    """Refuse a spec that a format cannot carry out.

    Args:
        key: the config key of the spec, used in messages.

    Raises:
        ValueError: a group size that the format does not have, or clip ratios that it does not take.
    """
    name = type(quantizer).__name__
    size = quantizer.group_size
    if size is not None and spec.group_size != size:
        shown = "null" if spec.group_size is None else spec.group_size
        raise ValueError(f"{key}.group_size={shown}: must be {size}, the only one of {name}; set {size}")
    if not quantizer.takes_clip_ratio and spec.clips:
        ratio = "clip_search=true" if spec.clip_search else f"clip_ratio={spec.clip_ratio}"
        raise ValueError(f"{key}.{ratio}: has no effect, since {name} takes no clip ratios; leave it out")
