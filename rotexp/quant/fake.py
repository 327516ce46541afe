"""Fake quantization with straight-through gradients: values that a format can represent, kept in floating point."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.quant.clip_search import search_clip_ratios
from rotexp.quant.encoded import EncodedTensor, encode, encode_codes
from rotexp.quant.grouping import computed, grouped_by
from rotexp.quant.integers import Integers, QuantizedTensor
from rotexp.quant.quantizer import Grid, Quantizer, check_takes, code_dtype
from rotexp.quant.scales import LearnedRatios
from rotexp.quant.spec import QuantSpec
from rotexp.quant.straight_through import LearnedStep, StraightThrough


class FakeQuantizer:
    """Rounds tensors to what a format can represent, as a spec describes; holds no parameters.

    The same object serves training and evaluation. It may be copied and pickled, cached clip ratios included.

    Attributes:
        quantizer: the format.
        learned: a handle on clip ratios that take the place of the spec's once they are in use, or None.
    """

    def __init__(self, spec: QuantSpec, quantizer: Quantizer | None = None) -> None:
        """Take a spec, and the format that its `_target_` names (None: integers, where it names none).

        Raises:
            ValueError: if `spec` is not valid, or the format cannot carry it out.
        """
        spec.validate("spec")
        if quantizer is None:
            assert spec.target is None, "a spec with _target_ needs what that names"
            quantizer = Integers(spec.bits, symmetric=spec.symmetric)
        check_takes(quantizer, spec, "spec")
        self.spec = spec
        self.quantizer = quantizer
        self.learned: LearnedRatios | None = None
        self._clip_ratios: Tensor | None = None

    @property
    def ratios(self) -> Tensor | None:
        """The learned clip ratios, `(..., groups)`, with their gradient; None where none are in use."""
        return self.learned.values if self.learned is not None and self.learned.in_use else None

    @property
    def clips(self) -> bool:
        """Whether values can lie outside the representable range."""
        return self.spec.clips or self.quantizer.clips or self.ratios is not None

    @property
    def code_dtype(self) -> torch.dtype:
        """The type of the codes that `encode` keeps."""
        return code_dtype(self.quantizer, clips=self.clips)

    def __call__(self, x: Tensor) -> Tensor:
        """Fake-quantize along the last dimension; return `x` itself if the spec is off.

        Statistics and arithmetic are float32 for narrower dtypes; the result is rounded to the dtype of `x` at the end.
        The gradient is straight-through (Bengio, Leonard and Courville, arXiv:1308.3432): the identity where `x` is
        representable, zero where it is clipped; scales and zero points are constants. "Clipped" is what the format
        says; of integers, that the rounded code lies outside the code range, so values up to half a step beyond the
        last code keep their gradient. Without clipping (ratio 1, no search) all gradients of integers pass, also where
        an exact tie at the top of an asymmetric range is rounded past the last code and comes back by one. A group of
        integers whose scale would be subnormal becomes zeros, and NaN and infinity make its whole group NaN.
        For that of learned ratios see `rotexp.quant.straight_through.ratio_slopes`.

        Args:
            x: `(..., width)`, floating point, any strides.

        Raises:
            ValueError: if the group size does not divide the width, or cached clip ratios do not fit `x`.
        """
        if not self.spec.enabled:
            return x
        ratios, groups = self.ratios, self._groups(x)
        values: Tensor = (
            StraightThrough.apply(x, self.quantizer, groups, self._clip(x), self.clips)  # type: ignore[no-untyped-call]
            if ratios is None
            else LearnedStep.apply(x, ratios, self.quantizer)  # type: ignore[no-untyped-call]
        )
        return values

    def quantize(self, x: Tensor) -> QuantizedTensor:
        """Quantize to integers; dequantizing them gives the values of `__call__`, except that -0.0 reads 0.0.

        Args:
            x: `(..., width)`, floating point.

        Raises:
            ValueError: if the spec is off or of another format, or for the reasons of `__call__`.
        """
        self._check_enabled()
        if not isinstance(self.quantizer, Integers):
            raise ValueError(f"{self.spec.setting} has no integer form; quantize with bits, or use encode")
        grouped = computed(grouped_by(x.detach(), groups=self._groups(x)))
        grid = self.quantizer.grid(grouped, self._clip(x))
        return self.quantizer.quantized(grid.clamp_(self.quantizer.encode(grouped, grid, clips=True)), grid)

    @torch.no_grad()
    def encode(self, x: Tensor) -> tuple[Tensor, EncodedTensor]:
        """Return the values of `__call__`, and in codes what a backward pass needs to form them again.

        Args:
            x: `(..., width)`, floating point.

        Raises:
            ValueError: if the spec is off, or for the reasons of `__call__`.
        """
        self._check_enabled()
        return encode(x, quantizer=self.quantizer, groups=self._groups(x), clip=self._clip(x), clips=self.clips)

    @torch.no_grad()
    def encode_codes(self, x: Tensor) -> EncodedTensor:
        """Return what `encode` does without the values."""
        self._check_enabled()
        return encode_codes(x, quantizer=self.quantizer, groups=self._groups(x), clip=self._clip(x), clips=self.clips)

    def kept(self, codes: Tensor, *grid: Tensor) -> EncodedTensor:
        """Return what `encode` gave, of which the `tensors` were kept."""
        return EncodedTensor(codes, Grid(*grid), self.quantizer, self.clips)

    def search(self, x: Tensor) -> Tensor:
        """Search the clip ratios of x: (..., width), as `rotexp.quant.clip_search` does; they are not kept."""
        return search_clip_ratios(x, quantizer=self.quantizer, groups=self._groups(x))

    def refresh(self) -> None:
        """Forget the cached clip ratios, so that the next use searches them anew."""
        self._clip_ratios = None

    def start(self, x: Tensor) -> None:
        """Let the learned ratios begin where the spec has those of `x`: searched, or its one ratio."""
        assert self.learned is not None, "only a quantizer whose ratios are learned can start them"
        self.learned.start(self.search(x) if self.spec.clip_search else self.spec.clip_ratio)

    @property
    def clip_ratios(self) -> Tensor | None:
        """The cached ratios, `(..., groups)`; None where none are searched, or were since the last `refresh`."""
        return self._clip_ratios

    @clip_ratios.setter
    def clip_ratios(self, ratios: Tensor | None) -> None:
        self._clip_ratios = ratios

    def _groups(self, x: Tensor) -> int:
        return self.spec.num_groups(x.shape[-1])

    def _check_enabled(self) -> None:
        if not self.spec.enabled:
            raise ValueError(f"bits={self.spec.bits} has no integer form; set bits to 2 to 8 to quantize")

    def _clip(self, x: Tensor) -> float | Tensor:
        """Return the ratio of all groups, or each group's own, `(..., groups, 1)`, learned or searched on first use."""
        ratios = self.ratios
        if ratios is not None:
            return ratios.detach().unsqueeze(-1)
        if not self.spec.clip_search:
            return self.spec.clip_ratio
        if self._clip_ratios is None:
            self._clip_ratios = self.search(x)
        expected = (*x.shape[:-1], self._groups(x))
        if self._clip_ratios.shape != expected:
            raise ValueError(
                f"cached clip ratios have shape {tuple(self._clip_ratios.shape)}, a tensor of shape {tuple(x.shape)} "
                f"needs {expected}; use one quantizer per tensor, or call refresh() when its shape changes"
            )
        return self._clip_ratios.to(x.device).unsqueeze(-1)
