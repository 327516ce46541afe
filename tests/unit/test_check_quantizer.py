"""The checker of formats passes those that keep the contract, and names what any other violates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rotexp.quant.integers import Integers
from rotexp.quant.quantizer import Grid, Quantizer, even_grid
from rotexp.testing import check_quantizer


class Ternary(Quantizer):
    """-1, 0 and 1 times the largest magnitude; the least format there is."""

    code_range = (-1, 1)
    learns_clip_ratio = True

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return even_grid(groups.abs().amax(-1, keepdim=True) * clip, self.code_range)

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        return torch.div(groups, grid.scale).round_()

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale


class Structural:
    """A format that is derived from nothing."""

    code_range, group_size, clips, takes_clip_ratio, learns_clip_ratio = (-1, 1), None, False, True, True
    grid, encode, decode = Ternary.grid, Ternary.encode, Ternary.decode


class Incomplete:
    code_range = (-1, 1)


class FlatScale(Ternary):
    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return Grid(*(part.squeeze(-1) for part in super().grid(groups, clip)))


class SingleGrid(Ternary):
    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return Grid(*(part.float() for part in super().grid(groups, clip)))


class IntegerCodes(Ternary):
    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        return super().encode(groups, grid, clips=clips).to(torch.int8)


class FlatCodes(Ternary):
    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        return super().encode(groups, grid, clips=clips).flatten()


class Overwriting(Ternary):
    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        return groups.div_(grid.scale).round_()


class Unrounded(Ternary):
    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        return groups / grid.scale


class WideCodes(Ternary):
    code_range = (-40_000, 40_000)


class GridBeyond(Ternary):
    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return even_grid(groups.abs().amax(-1, keepdim=True) * clip, (-2, 2))


class Overflowing(Ternary):
    """Of half the range, without saying that it clips."""

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return even_grid(groups.abs().amax(-1, keepdim=True) * clip / 2, self.code_range)


class Shrinking(Ternary):
    """Decodes to values that it encodes otherwise."""

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale * 0.4


class NoZero(Ternary):
    """Two levels, neither zero."""

    code_range = (0, 1)

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        signs = (groups >= 0).to(groups.dtype)
        return signs + (groups > grid.scale) - (groups < -grid.scale).to(groups.dtype)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (2 * codes - 1) * scale


class NaNOfZeros(Ternary):
    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        scale = groups.abs().amax(-1, keepdim=True) * clip
        return Grid(scale, torch.full_like(scale, -1), torch.full_like(scale, 1))


class Spreading(Ternary):
    """One scale for all groups."""

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return even_grid(groups.abs().amax().expand(*groups.shape[:-1], 1) * clip, self.code_range)


class Hiding(Ternary):
    """Takes NaN and infinity for zeros."""

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return super().grid(groups.nan_to_num(0.0, 0.0, 0.0), clip)

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        return super().encode(groups.nan_to_num(0.0, 0.0, 0.0), grid, clips=clips)


class Neighborly(Ternary):
    """Scales by the neighbor's as well, where there is one."""

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        largest = groups.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True)
        return even_grid(torch.maximum(largest, largest.roll(1, 0)) * clip * _poison(groups), self.code_range)


def _poison(groups: Tensor) -> Tensor:
    """Return 1 for each group, NaN where a value is not finite."""
    return (groups * 0).sum(-1, keepdim=True) + 1


class Centered(Ternary):
    """Codes depend on the group beside its grid."""

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        shift = groups.mean(-1, keepdim=True) / 1e3 if groups.shape[-1] == 1 else 0.0
        return super().encode(groups + 600 * shift, grid, clips=clips)


class Calibrating(Ternary):
    """Keeps the largest scale that it has seen."""

    def __init__(self) -> None:
        self.seen = 0.0

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        self.seen += 0.05
        return even_grid(groups.abs().amax(-1, keepdim=True) * clip * (1 + self.seen), self.code_range)


class TwoDimensional(Ternary):
    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        if groups.ndim > 3:
            return even_grid(2 * groups.abs().amax(-1, keepdim=True) * clip, self.code_range)
        return super().grid(groups, clip)


class RoundsWithin(Ternary):
    """Decodes in the dtype of codes."""

    code_range = (-100, 100)

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return even_grid(groups.abs().amax(-1, keepdim=True) * clip / 100, self.code_range)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.mul(1 / 3).mul(scale).mul(3)


class Trained(Ternary):
    def __init__(self) -> None:
        self.gain = torch.ones((), requires_grad=True)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale * self.gain.to(scale.dtype)


class Unpicklable(Ternary):
    def __init__(self) -> None:
        self.round = lambda codes: codes.round()


class Fixed(Ternary):
    """Heeds no ratio, without saying so."""

    learns_clip_ratio = False

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return super().grid(groups, 1.0)


class Silent(Ternary):
    """Shows by no code where it clips."""

    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        return super().encode(groups, grid, clips=clips).clamp_(-1, 1)


class Rooted(Ternary):
    """Scales grow by the root of the ratio."""

    def grid(self, groups: Tensor, clip: float | Tensor) -> Grid:
        return super().grid(groups, clip**0.5)


class Offset(Ternary):
    """Values are not proportional to the scale."""

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes * (scale + 1e-3 * scale.square())


class LearnsOnly(Ternary):
    takes_clip_ratio = False


class Failing(Ternary):
    def encode(self, groups: Tensor, grid: Grid, *, clips: bool) -> Tensor:
        raise RuntimeError("not for float64" if groups.dtype is torch.float64 else "never")


BROKEN = {
    Incomplete: "lacks group_size, clips, takes_clip_ratio, learns_clip_ratio, grid, encode, decode",
    FlatScale: "grid.scale is (6,), not (..., groups, 1)",
    SingleGrid: "grid.scale is torch.float32 for values of torch.float64",
    IntegerCodes: "encode returns torch.int8",
    FlatCodes: "encode returns (96,) for groups of (6, 16)",
    Overwriting: "writes to the values that it is given",
    Unrounded: "codes that are not whole numbers",
    WideCodes: "code_range=(-40000, 40000) does not fit int16",
    GridBeyond: "grid has codes outside code_range=(-1, 1)",
    Overflowing: "codes beyond the grid although clips=False",
    Shrinking: "quantizing twice on the same grid changes values",
    NoZero: "a group of zeros becomes",
    NaNOfZeros: "a group of zeros becomes nan",
    Spreading: "nan in one group changes another",
    Hiding: "nan in a group does not show in its values",
    Neighborly: "depend on the order of groups, or on other groups",
    Centered: "encode of one column at a time gives other codes",
    Calibrating: "the same values are quantized differently the second time",
    TwoDimensional: "a tensor of three dimensions",
    RoundsWithin: "decode of codes in bfloat16 gives other values",
    Trained: "holds a tensor that requires a gradient",
    Unpicklable: "cannot be pickled",
    Fixed: "a clip ratio does not change scales; set takes_clip_ratio=False",
    Silent: "encode shows by no code that a ratio of 0.5 clips",
    Rooted: "scales are not proportional to the clip ratio",
    Offset: "values are not proportional to the scale",
    LearnsOnly: "learns clip ratios that it does not take",
    Failing: "Failing: shapes and dtypes, torch.float32: raised RuntimeError: never",
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_our_own_integers_keep_the_contract(bits: int, symmetric: bool) -> None:
    check_quantizer(Integers, bits=bits, symmetric=symmetric)


@pytest.mark.parametrize("good", [Ternary, Structural])
def test_a_format_that_keeps_the_contract_passes(good: Any) -> None:
    check_quantizer(good)


@pytest.mark.parametrize(("broken", "sentence"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_violated_is_named(broken: Any, sentence: str) -> None:
    with pytest.raises(AssertionError) as refusal:
        check_quantizer(broken)
    assert sentence in str(refusal.value)
    assert str(refusal.value).startswith(f"{broken.__name__}: ")


def test_options_are_given_to_the_class() -> None:
    with pytest.raises(AssertionError, match=r"Integers: cls\(\*\*options\): raised TypeError: .*bits"):
        check_quantizer(Integers)


def test_members_that_an_object_lacks_are_found() -> None:
    check_quantizer(Ternary)
    with pytest.raises(AssertionError, match=r"object: lacks code_range, group_size, .*decode; derive it from"):
        check_quantizer(object)
