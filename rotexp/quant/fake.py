"""Fake quantization with straight-through gradients: values on the integer grid, kept in floating point."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """

    def __init__(self, spec: QuantSpec) -> None:
        """Take a spec.

        Raises:
            ValueError: if `spec` is not valid.
        """
        spec.validate("spec")
        self.spec = spec
        self._clip_ratios: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Fake-quantize along the last dimension; return `x` itself if the spec is off.

        Statistics and arithmetic are float32 for narrower dtypes; the result is rounded to the dtype of `x` at the end.
        The gradient is straight-through (Bengio, Leonard and Courville, arXiv:1308.3432): the identity where `x` is
        representable, zero where it is clipped; scales and zero points are constants. "Clipped" means that the rounded
        code lies outside the code range, so values up to half a step beyond the last code keep their gradient.
        Without clipping (ratio 1, no search) all gradients pass, also where an exact tie at the top of an asymmetric
        range is rounded past the last code and comes back by one. A group whose scale would be subnormal becomes zeros.
        NaN and infinity make their whole group NaN.

        Args:
            x: `(..., width)`, floating point, any strides.

        Raises:
            ValueError: if the group size does not divide the width, or cached clip ratios do not fit `x`.
        """
        if not self.spec.enabled:
            return x
        values: Tensor = _StraightThrough.apply(x, self.spec, self._clip(x))  # type: ignore[no-untyped-call]
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
        grouped = _grouped(x, groups=self.spec.num_groups(x.shape[-1])).to(_compute_dtype(x))
        grid = _grid(grouped, spec=self.spec, clip=self._clip(x))
        codes = grid.round(grouped)
        margin = int(self.spec.clips)
        torch.maximum(codes, grid.lowest - margin, out=codes)
        torch.minimum(codes, grid.highest + margin, out=codes)
        kept = codes.flatten(-2).to(_signed_dtype(self.spec))
        values = grid.clamp_(codes).mul_(grid.scale).flatten(-2).to(x.dtype)
        return values, EncodedTensor(kept, grid.scale, grid.lowest, grid.highest, self.spec.clips)

    def refresh(self) -> None:
        """Forget the cached clip ratios, so that the next use searches them anew."""
        self._clip_ratios = None

    def _clip(self, x: Tensor) -> float | Tensor:
        """Return the ratio of all groups, or each group's own, `(..., groups, 1)`, searched on first use."""
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


def _signed_dtype(spec: QuantSpec) -> torch.dtype:
    """Return the narrowest type of codes less their zero point, and of one code beyond them if the spec clips."""
    lowest, highest = spec.code_range if spec.symmetric else (-spec.code_range[1], spec.code_range[1])
    narrow = torch.iinfo(torch.int8)
    fits = lowest - spec.clips >= narrow.min and highest + spec.clips <= narrow.max
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
