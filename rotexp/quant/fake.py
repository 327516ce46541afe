"""Fake quantization with straight-through gradients: values on the integer grid, kept in floating point."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotexp.quant.scales import LearnedRatios
from rotexp.quant.spec import QuantSpec

CLIP_RATIOS = tuple(1.0 - 0.025 * step for step in range(21))
SEARCH_CHUNK_ELEMENTS = 2**20


class QuantizedTensor(NamedTuple):
    """A tensor in integer form.

    Attributes:
        codes: `(..., width)`, uint8 if asymmetric, int8 if symmetric.
        scale: `(..., groups)`, float32 (float64 for a float64 tensor).
        zero: `(..., groups)`, the zero points, of the dtype of `codes`; all 0 if symmetric.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `(codes - zero) * scale`, shape `(..., width)`: the values that fake quantization gives."""
        codes = _grouped(self.codes, groups=self.scale.shape[-1]).to(self.scale.dtype)
        values = codes.sub_(self.zero.unsqueeze(-1)).mul_(self.scale.unsqueeze(-1))
        return values.flatten(-2).to(dtype)


class EncodedTensor(NamedTuple):
    """What a backward pass needs of a quantized tensor, in a quarter of its float32 size (half for clipped 8 bits).

    Attributes:
        codes: `(..., width)`, int8, or int16 if the codes need it: less the zero point, and one beyond the range where
            a value is clipped.
        scale, lowest, highest: `(..., groups, 1)`, the grid, of the dtype in which it was computed.
        clips: whether codes may lie beyond the range.
    """

    codes: Tensor
    scale: Tensor
    lowest: Tensor
    highest: Tensor
    clips: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The attributes that autograd may save."""
        return self.codes, self.scale, self.lowest, self.highest

    def decode(self, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """Return the fake-quantized values, and where they are not clipped.

        Returns:
            values: `(..., width)` of `dtype`, what `FakeQuantizer.__call__` gives, except that -0.0 reads 0.0.
            passes: `(..., width)`, 1 where the straight-through gradient passes and 0 elsewhere, of the grid's dtype;
                None if it passes everywhere.
        """
        codes = _grouped(self.codes, groups=self.scale.shape[-2]).to(self.scale.dtype)
        if not self.clips:
            return codes.mul_(self.scale).flatten(-2).to(dtype), None
        bounded = torch.minimum(codes, self.highest)
        torch.maximum(bounded, self.lowest, out=bounded)
        passes = codes.eq_(bounded).flatten(-2)
        return bounded.mul_(self.scale).flatten(-2).to(dtype), passes


class FakeQuantizer:
    """Rounds tensors onto the integer grid that a spec describes; holds no parameters.

    The same object serves training and evaluation. It may be copied and pickled, cached clip ratios included.

    Attributes:
        learned: a handle on clip ratios that take the place of the spec's once they are in use, or None.
    """

    def __init__(self, spec: QuantSpec) -> None:
        """Take a spec.

        Raises:
            ValueError: if `spec` is not valid.
        """
        spec.validate("spec")
        self.spec = spec
        self.learned: LearnedRatios | None = None
        self._clip_ratios: Tensor | None = None

    @property
    def ratios(self) -> Tensor | None:
        """The learned clip ratios, `(..., groups)`, with their gradient; None where none are in use."""
        return self.learned.values if self.learned is not None and self.learned.in_use else None

    @property
    def clips(self) -> bool:
        """Whether values can lie outside the representable range."""
        return self.spec.clips or self.ratios is not None

    @property
    def code_dtype(self) -> torch.dtype:
        """The type of the codes that `encode` keeps."""
        return _signed_dtype(self.spec, clips=self.clips)

    def __call__(self, x: Tensor) -> Tensor:
        """Fake-quantize along the last dimension; return `x` itself if the spec is off.

        Statistics and arithmetic are float32 for narrower dtypes; the result is rounded to the dtype of `x` at the end.
        The gradient is straight-through (Bengio, Leonard and Courville, arXiv:1308.3432): the identity where `x` is
        representable, zero where it is clipped; scales and zero points are constants. "Clipped" means that the rounded
        code lies outside the code range, so values up to half a step beyond the last code keep their gradient.
        Without clipping (ratio 1, no search) all gradients pass, also where an exact tie at the top of an asymmetric
        range is rounded past the last code and comes back by one. A group whose scale would be subnormal becomes zeros.
        NaN and infinity make their whole group NaN. For that of learned ratios see `ratio_slopes`.

        Args:
            x: `(..., width)`, floating point, any strides.

        Raises:
            ValueError: if the group size does not divide the width, or cached clip ratios do not fit `x`.
        """
        if not self.spec.enabled:
            return x
        ratios = self.ratios
        values: Tensor = (
            _StraightThrough.apply(x, self.spec, self._clip(x))  # type: ignore[no-untyped-call]
            if ratios is None
            else _LearnedStep.apply(x, ratios, self.spec)  # type: ignore[no-untyped-call]
        )
        return values

    def quantize(self, x: Tensor) -> QuantizedTensor:
        """Quantize to integers; dequantizing them gives the values of `__call__`, except that -0.0 reads 0.0.

        Args:
            x: `(..., width)`, floating point.

        Raises:
            ValueError: if the spec is off, or for the reasons of `__call__`.
        """
        if not self.spec.enabled:
            raise ValueError(f"bits={self.spec.bits} has no integer form; set bits to 2 to 8 to quantize")
        dtype = torch.int8 if self.spec.symmetric else torch.uint8
        grouped = _grouped(x.detach(), groups=self.spec.num_groups(x.shape[-1])).to(_compute_dtype(x))
        grid = _grid(grouped, spec=self.spec, clip=self._clip(x))
        codes = grid.clamp_(grid.round(grouped)).add_(grid.zero)
        return QuantizedTensor(codes.flatten(-2).to(dtype), grid.scale.squeeze(-1), grid.zero.squeeze(-1).to(dtype))

    @torch.no_grad()
    def encode(self, x: Tensor) -> tuple[Tensor, EncodedTensor]:
        """Return the values of `__call__`, and in integers what a backward pass needs to form them again.

        Args:
            x: `(..., width)`, floating point.

        Raises:
            ValueError: if the spec is off, or for the reasons of `__call__`.
        """
        if not self.spec.enabled:
            raise ValueError(f"bits={self.spec.bits} has no integer form; set bits to 2 to 8 to quantize")
        return _encode(x, spec=self.spec, clip=self._clip(x), clips=self.clips)

    def refresh(self) -> None:
        """Forget the cached clip ratios, so that the next use searches them anew."""
        self._clip_ratios = None

    def start(self, x: Tensor) -> None:
        """Let the learned ratios begin where the spec has those of `x`: searched, or its one ratio."""
        assert self.learned is not None, "only a quantizer whose ratios are learned can start them"
        self.learned.start(search_clip_ratios(x, spec=self.spec) if self.spec.clip_search else self.spec.clip_ratio)

    @property
    def clip_ratios(self) -> Tensor | None:
        """The cached ratios, `(..., groups)`; None where none are searched, or were since the last `refresh`."""
        return self._clip_ratios

    @clip_ratios.setter
    def clip_ratios(self, ratios: Tensor | None) -> None:
        self._clip_ratios = ratios

    def _clip(self, x: Tensor) -> float | Tensor:
        """Return the ratio of all groups, or each group's own, `(..., groups, 1)`, learned or searched on first use."""
        ratios = self.ratios
        if ratios is not None:
            return ratios.detach().unsqueeze(-1)
        if not self.spec.clip_search:
            return self.spec.clip_ratio
        if self._clip_ratios is None:
            self._clip_ratios = search_clip_ratios(x, spec=self.spec)
        expected = (*x.shape[:-1], self.spec.num_groups(x.shape[-1]))
        if self._clip_ratios.shape != expected:
            raise ValueError(
                f"cached clip ratios have shape {tuple(self._clip_ratios.shape)}, a tensor of shape {tuple(x.shape)} "
                f"needs {expected}; use one quantizer per tensor, or call refresh() when its shape changes"
            )
        return self._clip_ratios.to(x.device).unsqueeze(-1)


def _encode(x: Tensor, *, spec: QuantSpec, clip: float | Tensor, clips: bool) -> tuple[Tensor, EncodedTensor]:
    """Return the fake-quantized values, and in integers what a backward pass needs to form them again."""
    grouped = _grouped(x, groups=spec.num_groups(x.shape[-1])).to(_compute_dtype(x))
    grid = _grid(grouped, spec=spec, clip=clip)
    codes = grid.round(grouped)
    margin = int(clips)
    torch.maximum(codes, grid.lowest - margin, out=codes)
    torch.minimum(codes, grid.highest + margin, out=codes)
    kept = codes.flatten(-2).to(_signed_dtype(spec, clips=clips))
    values = grid.clamp_(codes).mul_(grid.scale).flatten(-2).to(x.dtype)
    return values, EncodedTensor(kept, grid.scale, grid.lowest, grid.highest, clips)


@torch.no_grad()
def search_clip_ratios(x: Tensor, *, spec: QuantSpec) -> Tensor:
    """Find each group's ratio in `CLIP_RATIOS` with the least squared error; the larger one where errors are equal.

    Works through about `SEARCH_CHUNK_ELEMENTS` elements at a time, so that it needs little memory beyond `x`.

    Args:
        x: `(..., width)`, floating point.
        spec: the quantizer; its `clip_ratio` is not used.

    Returns:
        The ratios, `(..., groups)`, float32 (float64 if `x` is).

    Raises:
        ValueError: if the group size does not divide the width.
    """
    grouped = _grouped(x, groups=spec.num_groups(x.shape[-1]))
    rows = grouped.reshape(-1, grouped.shape[-1])
    chunks = torch.split(rows, max(1, SEARCH_CHUNK_ELEMENTS // grouped.shape[-1]))
    return torch.cat([_best_ratios(chunk, spec=spec) for chunk in chunks]).reshape(grouped.shape[:-1])


def _best_ratios(rows: Tensor, *, spec: QuantSpec) -> Tensor:
    """Search the ratios of rows `(rows, group_size)`; return `(rows,)`."""
    rows = rows.to(_compute_dtype(rows))
    least_errors = rows.new_full(rows.shape[:1], torch.inf)
    best_ratios = torch.ones_like(least_errors)
    for ratio in CLIP_RATIOS:
        grid = _grid(rows, spec=spec, clip=ratio)
        errors = torch.linalg.vector_norm(grid.clamp_(grid.round(rows)).mul_(grid.scale).sub_(rows), dim=-1)
        best_ratios[errors < least_errors] = ratio
        least_errors = torch.minimum(errors, least_errors)
    return best_ratios


class _Grid(NamedTuple):
    """The integer grid of every group; all tensors `(..., groups, 1)`, of the compute dtype.

    `lowest` and `highest` bound codes before the zero point is added, which saves adding and subtracting it.
    """

    scale: Tensor
    zero: Tensor
    lowest: Tensor
    highest: Tensor
    asymmetric: bool

    def round(self, grouped: Tensor) -> Tensor:
        """Return unbounded codes less the zero point, in fresh memory."""
        return torch.div(grouped, self.scale).round_()

    def bound_unclipped_(self, codes: Tensor) -> Tensor:
        """Bound codes in place whose range was not shrunk: they can only lie one above it, and only if asymmetric.

        Division and rounding are monotonic and odd, so the least value is rounded to `lowest` exactly (asymmetric), and
        the largest magnitude to `highest` or its negative (symmetric).
        """
        return codes if not self.asymmetric else torch.minimum(codes, self.highest, out=codes)

    def clamp_(self, codes: Tensor) -> Tensor:
        """Bound codes in place."""
        # Tensor.clamp_ with tensor bounds is not vectorized on CPU and takes ten times as long.
        torch.maximum(codes, self.lowest, out=codes)
        return torch.minimum(codes, self.highest, out=codes)


def _grid(grouped: Tensor, *, spec: QuantSpec, clip: float | Tensor) -> _Grid:
    """Derive scale and zero point of every group of a tensor of the compute dtype.

    Affine grids as in Jacob et al., arXiv:1712.05877, equation 1 and section 3; the range always includes zero.
    """
    # Two reductions, since torch.aminmax over a dimension is not vectorized on CPU and takes ten times as long as both.
    minimum = grouped.amin(-1, keepdim=True)
    maximum = grouped.amax(-1, keepdim=True)
    lowest, highest = spec.code_range
    if spec.symmetric:
        scale = _nonzero(torch.maximum(maximum, -minimum) * clip / highest)
        zero = torch.zeros_like(scale)
    else:
        minimum = minimum.clamp_(max=0.0) * clip
        maximum = maximum.clamp_(min=0.0) * clip
        scale = _nonzero((maximum - minimum) / highest)
        zero = torch.div(-minimum, scale).round_()
    return _Grid(scale, zero, lowest - zero, highest - zero, not spec.symmetric)


def _nonzero(scale: Tensor) -> Tensor:
    """Replace scales too small for a normal number by 1, in place, so that their groups become exact zeros."""
    return scale.masked_fill_(scale < torch.finfo(scale.dtype).tiny, 1.0)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for a float64 tensor."""
    return torch.promote_types(x.dtype, torch.float32)


def _signed_dtype(spec: QuantSpec, *, clips: bool) -> torch.dtype:
    """Return the narrowest type of codes less their zero point, and of one code beyond them if there is clipping."""
    lowest, highest = spec.code_range if spec.symmetric else (-spec.code_range[1], spec.code_range[1])
    narrow = torch.iinfo(torch.int8)
    fits = lowest - clips >= narrow.min and highest + clips <= narrow.max
    return torch.int8 if fits else torch.int16


def _grouped(x: Tensor, *, groups: int) -> Tensor:
    """View `(..., width)` as `(..., groups, group_size)`."""
    return torch.unflatten(x, -1, (groups, x.shape[-1] // groups))


class _StraightThrough(torch.autograd.Function):
    """Fake quantization that keeps a bool mask of unclipped values for the backward pass, or nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, clip: float | Tensor) -> Tensor:
        grouped = _grouped(x, groups=spec.num_groups(x.shape[-1])).to(_compute_dtype(x))
        grid = _grid(grouped, spec=spec, clip=clip)
        codes = grid.round(grouped)
        if spec.clips and ctx.needs_input_grad[0]:
            bounded = grid.clamp_(codes.clone())
            # Comparing in place, in floating point, is vectorized on CPU; comparing into a bool tensor is not.
            ctx.save_for_backward(codes.eq_(bounded).bool().flatten(-2))
            codes = bounded
        elif spec.clips:
            grid.clamp_(codes)
        else:
            grid.bound_unclipped_(codes)
        return codes.mul_(grid.scale).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        for kept in ctx.saved_tensors:
            # As bytes, since neither masked_fill nor the conversion of a bool tensor is vectorized on CPU.
            gradient = kept.view(torch.uint8).to(gradient.dtype).mul_(gradient)
        return gradient, None, None


class _LearnedStep(torch.autograd.Function):
    """Fake quantization with learned ratios, which keeps its two arguments and quantizes once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ratios: Tensor, spec: QuantSpec) -> Tensor:
        ctx.save_for_backward(x, ratios)
        ctx.spec = spec
        return _encode(x, spec=spec, clip=ratios.unsqueeze(-1), clips=True)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, ratios = ctx.saved_tensors
        encoded = _encode(x, spec=ctx.spec, clip=ratios.unsqueeze(-1), clips=True)[1]
        values, passes = encoded.decode(dtype=x.dtype)
        assert passes is not None, "learned ratios clip"
        for_ratios = None
        if ctx.needs_input_grad[1]:
            slopes = ratio_slopes(x, values=values, passes=passes, ratios=ratios)
            for_ratios = sum_groups(slopes.mul_(gradient), like=ratios)
        for_x = gradient * passes.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return for_x, for_ratios, None


def ratio_slopes(x: Tensor, *, values: Tensor, passes: Tensor | None, ratios: Tensor) -> Tensor:
    """Return the slope of each fake-quantized value by its group's clip ratio, `(..., width)`, of the grid's dtype.

    Equation 3 of Esser et al., "Learned Step Size Quantization", ICLR 2020: the slope by the scale is the code, less
    x / scale where x is not clipped. The scale is the ratio times a constant (the group's extremes do not move), so the
    slope by the ratio is `(value − passes · x) / ratio`. The paper's factor on this gradient is left out: AdamW does
    not depend on it, and the joint norm of all gradients remains that of the loss.

    Args:
        x: `(..., width)`, what was quantized.
        values, passes: as `EncodedTensor.decode` gives them.
        ratios: `(..., groups)`.
    """
    errors = _grouped(values - (x if passes is None else passes * x), groups=ratios.shape[-1])
    return errors.div_(ratios.unsqueeze(-1)).flatten(-2)


def sum_groups(values: Tensor, *, like: Tensor) -> Tensor:
    """Add up each group of `(..., width)`; the sums `(..., groups)` have shape and dtype of `like`."""
    return _grouped(values, groups=like.shape[-1]).sum(-1).to(like.dtype)
