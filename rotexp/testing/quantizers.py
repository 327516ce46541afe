"""Checks that a format of numbers keeps the contract of `rotexp.quant.quantizer`: `check_quantizer(MyFormat)`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rotexp.config.targets import members
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.quantizer import Quantizer
from rotexp.testing.quantizer_case import COUNT, QuantizerCase, require
from rotexp.testing.rules import rule

DTYPES = (torch.float32, torch.float64)
"""Those in which a format computes; values of narrower ones reach it as float32."""


def check_quantizer(cls: Callable[..., Quantizer], **options: Any) -> None:
    """Try a format on groups that are ordinary, zero, tiny, huge or not finite, and in every use that rotexp makes.

    Args:
        cls: the class that `_target_` names.
        options: what is to stand beside `_target_`.

    Raises:
        AssertionError: a sentence that says what is violated.
    """
    name = getattr(cls, "__name__", str(cls))
    with rule(f"{name}: cls(**options)"):
        quantizer = cls(**options)
    missing = [member for member in members(Quantizer) if not hasattr(quantizer, member)]
    require(not missing, name, f"lacks {', '.join(missing)}; derive it from rotexp.quant.quantizer.Quantizer")
    for check in _CHECKS:
        for dtype in DTYPES:
            with rule(f"{name}: {check.__name__.strip('_').replace('_', ' ')}, {dtype}"):
                check(QuantizerCase(name, quantizer, dtype))


def _shapes_and_dtypes(case: QuantizerCase) -> None:
    groups, quantizer = case.groups(), case.quantizer
    before = groups.clone()
    grid = quantizer.grid(groups, 1.0)
    for part, tensor in grid._asdict().items():
        case.require(tensor.shape == (COUNT, 1), f"grid.{part} is {tuple(tensor.shape)}, not (..., groups, 1)")
        case.require(tensor.dtype == case.dtype, f"grid.{part} is {tensor.dtype} for values of {case.dtype}")
    codes = quantizer.encode(groups, grid, clips=quantizer.clips)
    case.require_like(codes, groups, "encode")
    case.require(torch.equal(groups, before), "grid or encode writes to the values that it is given")
    case.require_like(quantizer.decode(grid.clamp_(codes), grid.scale), groups, "decode")


def _codes_fit(case: QuantizerCase) -> None:
    lowest, highest = case.quantizer.code_range
    wide = torch.iinfo(torch.int16)
    case.require(lowest < highest, f"code_range={(lowest, highest)} is empty")
    case.require(wide.min < lowest and highest < wide.max, f"code_range={(lowest, highest)} does not fit int16")
    grid, codes, _ = case.used(case.groups())
    case.require((codes == codes.round()).all(), "encode returns codes that are not whole numbers")
    inside = (grid.lowest >= lowest).all() and (grid.highest <= highest).all()
    case.require(inside, f"grid has codes outside code_range={(lowest, highest)}")
    if not case.quantizer.clips:
        within = (codes >= grid.lowest).all() and (codes <= grid.highest).all()
        case.require(within, "encode returns codes beyond the grid although clips=False")


def _values_stay(case: QuantizerCase) -> None:
    grid, _, values = case.used(case.groups())
    codes = grid.clamp_(case.quantizer.encode(values, grid, clips=case.quantizer.clips))
    again = case.quantizer.decode(codes, grid.scale)
    case.require(torch.equal(again, values), "quantizing twice on the same grid changes values: decode(encode(x))")


def _zeros_stay(case: QuantizerCase) -> None:
    groups = case.groups()
    groups[2] = 0.0
    values = case.fake(groups)
    case.require((values[2] == 0.0).all(), f"a group of zeros becomes {_some(values[2])}")
    case.require(case.fake(groups * 1e-30).isfinite().all(), "groups of tiny values become NaN or infinite")


def _poison_stays(case: QuantizerCase) -> None:
    clean = case.groups()
    expected = case.fake(clean)
    for poison in (torch.nan, torch.inf, -torch.inf):
        groups = clean.clone()
        groups[1, 3] = poison
        for values in (case.fake(groups), case.fake.encode(groups)[1].decode(dtype=case.dtype)[0]):
            case.require(torch.equal(values[[0, 2]], expected[[0, 2]]), f"{poison} in one group changes another")
            case.require(not values[1].isfinite().all(), f"{poison} in a group does not show in its values")


def _groups_are_apart(case: QuantizerCase) -> None:
    groups = case.groups()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    same = torch.equal(case.fake(groups[order]), case.fake(groups)[order])
    case.require(same, "values depend on the order of groups, or on other groups")
    alone = torch.cat([case.fake(group[None]) for group in groups])
    case.require(
        torch.equal(alone, case.fake(groups)), "values of a group depend on which others are quantized with it"
    )


def _columns_are_apart(case: QuantizerCase) -> None:
    groups = case.groups()
    grid, codes, values = case.used(groups)
    clips = case.quantizer.clips
    columns = torch.cat([case.quantizer.encode(column, grid, clips=clips) for column in torch.split(groups, 1, -1)], -1)
    case.require(
        torch.equal(columns, codes), "encode of one column at a time gives other codes than of the whole group"
    )
    parts = (case.quantizer.decode(column.clone(), grid.scale) for column in torch.split(grid.clamp_(columns), 1, -1))
    case.require(torch.equal(torch.cat(list(parts), -1), values), "decode of one column at a time gives other values")


def _is_deterministic(case: QuantizerCase) -> None:
    groups = case.groups()
    first, _, second = case.fake(groups), case.fake(case.groups(seed=1)), case.fake(groups)
    case.require(torch.equal(first, second), "the same values are quantized differently the second time")


def _any_shape(case: QuantizerCase) -> None:
    rows = torch.cat([case.groups(seed=seed) for seed in range(4)]).reshape(6, 4 * case.size)
    expected = case.fake(rows)
    for shape in ((2, 3, -1), (3, 2, -1), (1, 6, -1)):
        same = torch.equal(case.fake(rows.reshape(shape)), expected.reshape(shape))
        case.require(same, f"a tensor of three dimensions, {tuple(rows.reshape(shape).shape)}, gives other values")
    strided = case.fake(rows.T.contiguous().T)
    case.require(torch.equal(strided, expected), "a tensor that is not contiguous gives other values")
    case.require(case.fake(rows[:0]).shape == rows[:0].shape, "a tensor without rows is not taken")


def _narrow_dtypes(case: QuantizerCase) -> None:
    rows = case.groups().bfloat16()
    expected = case.fake(rows.float()).bfloat16()
    case.require(torch.equal(case.fake(rows), expected), "bfloat16 is not quantized as its values in float32 are")
    grid, codes, values = case.used(case.groups())
    narrow = case.quantizer.decode(grid.clamp_(codes).bfloat16(), grid.scale).bfloat16()
    case.require(torch.equal(narrow, values.bfloat16()), "decode of codes in bfloat16 gives other values, once rounded")


def _needs_no_gradient(case: QuantizerCase) -> None:
    own = [value for value in vars(case.quantizer).values() if isinstance(value, (Tensor, nn.Module))]
    tensors = [tensor for value in own for tensor in ([value] if isinstance(value, Tensor) else value.parameters())]
    learned = any(tensor.requires_grad for tensor in tensors)
    case.require(not learned, "holds a tensor that requires a gradient, and a format gets none")


def _gradients(case: QuantizerCase) -> None:
    groups = case.groups().requires_grad_()
    (gradient,) = torch.autograd.grad(case.fake(groups).sum(), groups)
    grid, codes, _ = case.used(groups.detach())
    passes = codes == grid.clamp(codes)
    case.require(torch.equal(gradient != 0, passes), "the gradient does not pass just where codes are in the range")
    values, encoded = case.fake.encode(groups.detach())
    decoded = encoded.decode(dtype=case.dtype)[0]
    case.require(torch.equal(decoded, values), "the backward pass decodes other values than the forward pass gave")


def _copies(case: QuantizerCase) -> None:
    groups = case.groups()
    for how, copied in (("copied", copy.deepcopy), ("pickled", _pickled)):
        with rule(f"{case.name}: cannot be {how}"):
            values = copied(case.fake)(groups)
        case.require(torch.equal(values, case.fake(groups)), f"once {how}, it gives other values")


def _pickled(quantizer: FakeQuantizer) -> FakeQuantizer:
    copied: FakeQuantizer = pickle.loads(pickle.dumps(quantizer))
    return copied


def _clip_ratios(case: QuantizerCase) -> None:
    quantizer, groups = case.quantizer, case.groups()
    whole, half = quantizer.grid(groups, 1.0), quantizer.grid(groups, 0.5)
    if not quantizer.takes_clip_ratio:
        case.require(not quantizer.learns_clip_ratio, "learns clip ratios that it does not take")
        return
    case.require((half.scale != whole.scale).all(), "a clip ratio does not change scales; set takes_clip_ratio=False")
    each = quantizer.grid(groups, torch.full((COUNT, 1), 0.5, dtype=case.dtype))
    case.require(torch.allclose(each.scale, half.scale), "a ratio for each group acts otherwise than one for all")
    grid, codes, _ = case.used(groups, clip=0.5)
    beyond = (codes < grid.lowest) | (codes > grid.highest)
    case.require(beyond.any(-1).all(), "encode shows by no code that a ratio of 0.5 clips, although clips=True")


def _learned_ratios(case: QuantizerCase) -> None:
    quantizer, groups = case.quantizer, case.groups()
    if not quantizer.learns_clip_ratio:
        return
    grid, codes, values = case.used(groups)
    half = quantizer.grid(groups, 0.5).scale
    case.require(
        torch.allclose(half, grid.scale / 2), "scales are not proportional to the clip ratio, so it cannot learn"
    )
    doubled = quantizer.decode(grid.clamp_(codes), 2 * grid.scale)
    case.require(torch.allclose(doubled, 2 * values), "values are not proportional to the scale, so it cannot learn")


def _some(values: Tensor) -> str:
    return ", ".join(f"{value:g}" for value in values[:3].tolist()) + ", …"


_CHECKS = (
    _needs_no_gradient,
    _shapes_and_dtypes,
    _is_deterministic,
    _codes_fit,
    _values_stay,
    _zeros_stay,
    _poison_stays,
    _groups_are_apart,
    _columns_are_apart,
    _any_shape,
    _narrow_dtypes,
    _gradients,
    _copies,
    _learned_ratios,
    _clip_ratios,
)
