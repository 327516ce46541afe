"""A linear that rotates and fake-quantizes in forward, and keeps its weight's name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotexp.models.arch import ValueRows
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import Rotation
from rotexp.rotation.hadamard import HadamardTransform
from rotexp.rotation.mode import Mode
from rotexp.rotation.products import rotated_linear
from rotexp.rotation.shared_input import SharedInput
from rotexp.rotation.side import LinearShape, Side, Sides, cheapest_sides, weight_sides
from rotexp.sharding.shards import local_rows


class RotatedLinear(nn.Module):
    """A linear between two rotated bases, its weight and input fake-quantized.

    With input rotation R and output rotation L it computes `Q(x) Q(Lᵀ W R)ᵀ + Lᵀ b` from the frozen `weight` W
    (outputs, inputs) and `bias` b; with an online Hadamard H, which takes R's place, `Q(x H) Q(Lᵀ W H)ᵀ + Lᵀ b`.
    Gradients reach the bank and x only.

    Attributes:
        input_rotation, output_rotation: None once merged, or where no rotation acts.
        output_rows: which outputs the output rotation acts on (None: all).
        online: None until `bake` has put H into W.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        mode: Mode,
        weight_quantizer: FakeQuantizer,
        input_quantizer: FakeQuantizer,
        input_rotation: Rotation | None = None,
        output_rotation: Rotation | None = None,
        output_rows: ValueRows | None = None,
        online: HadamardTransform | None = None,
        shared: SharedInput | None = None,
    ) -> None:
        super().__init__()
        assert online is None or input_rotation is None, "a linear's input is rotated online or by a rotation, not both"
        self.weight = linear.weight
        self.bias = linear.bias
        self.mode = mode
        self.weight_quantizer = weight_quantizer
        self.input_quantizer = input_quantizer
        self.input_rotation = input_rotation
        self.output_rotation = output_rotation
        self.output_rows = output_rows
        self.online: HadamardTransform | None = None
        self._unbaked = online
        self.reuse = False
        self._kept: Tensor | None = None
        self.shared = SharedInput() if shared is None else shared
        self._reader = self.shared.join(self._shape())

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (..., inputs) to (..., outputs)."""
        if self.online is not None:
            x = self.online(x)
        quantized = self.mode.quantize and self.weight_quantizer.spec.enabled
        linears = self.shared.linears
        sides = weight_sides(linears) if quantized else cheapest_sides(linears, tokens=_tokens(x), learned=True)
        x = self.shared(
            x,
            reader=self._reader,
            kind=(self.mode.quantize, self.mode.rotate, sides.input, self.input_quantizer.spec),
            compute=lambda x: self._prepare(x, side=sides.input),
        )
        if quantized and self.reuse:
            return F.linear(x, self._quantized_weight(), self._rotated_bias())
        return self._multiply(x, sides)

    def _prepare(self, x: Tensor, *, side: Side) -> Tensor:
        """Quantize the input, and rotate it back if that is done on its side."""
        x = self.input_quantizer(x) if self.mode.quantize else x
        rotation = self.input_rotation if self.mode.rotate and side is Side.tokens else None
        return x if rotation is None else rotation.unrotate(x)

    def _multiply(self, x: Tensor, sides: Sides) -> Tensor:
        """Multiply by the weight, with what is rotated on its side inside."""
        before = self.input_rotation if self.mode.rotate and sides.input is Side.weight else None
        after = self.output_rotation if self.mode.rotate else None
        inside = after if sides.outputs[self._reader] is Side.weight else None
        if before is None and inside is None and not (self.mode.quantize and self.weight_quantizer.spec.enabled):
            y = F.linear(x, self.weight, self.bias)
        else:
            y = rotated_linear(
                x,
                weight=self.weight,
                bias=self.bias if inside is None else self._rotated_bias(),
                quantizer=self.weight_quantizer if self.mode.quantize else _OFF,
                input_rotation=None if before is None else before.matrix,
                output_rotation=None if inside is None else inside.matrix,
                output_rows=self.output_rows,
            )
        if after is None or inside is not None:
            return y
        return _on_rows(self.output_rows, after.rotate, y, dim=-1)

    def _shape(self) -> LinearShape:
        outputs, inputs = self.weight.shape
        before, after = (0 if r is None else r.matrix.shape[-1] for r in (self.input_rotation, self.output_rotation))
        rows = self.output_rows
        rotated = None if rows is None else rows.num_blocks * (rows.stop - rows.start)
        return LinearShape(inputs, outputs, before, after, rotated)

    def _quantized_weight(self) -> Tensor:
        if not self.reuse:
            return self.weight_quantizer(self._rotated_weight())
        if self._kept is None:
            self._kept = self.weight_quantizer(self._rotated_weight())
        return self._kept

    @property
    def sides(self) -> tuple[str, str]:
        """What rotates input and output, by name; empty where nothing does."""
        rotations = (self.input_rotation, self.output_rotation)
        names = [rotation.name if rotation else "" for rotation in rotations]
        online = self.online or self._unbaked
        part = "" if self.output_rows is None or not names[1] else " (values)"
        return (f"R4: H{online.order}, online" if online else names[0]), names[1] + part

    def quantized_widths(self) -> list[tuple[str, QuantSpec, int]]:
        """Return for weights and activations their quantizer's spec and the width it divides into groups."""
        width = self.weight.shape[1]
        return [("weights", self.weight_quantizer.spec, width), ("activations", self.input_quantizer.spec, width)]

    def refresh(self) -> None:
        """Forget the cached clip ratios."""
        self.weight_quantizer.refresh()

    def keep_quantized_weight(self, reuse: bool) -> None:
        """Use the next forward's quantized weight again in those after it, or (False) forget it."""
        self.reuse, self._kept = reuse, None

    def _rotated_weight(self) -> Tensor:
        weight: Tensor = self.weight
        if not self.mode.rotate:
            return weight
        if self.input_rotation is not None:
            weight = self.input_rotation.rotate(weight)
        return self._rotate_rows(weight)

    def _rotated_bias(self) -> Tensor | None:
        if self.bias is None or self.output_rotation is None or not self.mode.rotate:
            return self.bias
        return self._rotate_rows(self.bias)

    def _rotate_rows(self, rows: Tensor) -> Tensor:
        if self.output_rotation is None:
            return rows
        return _on_rows(self.output_rows, self.output_rotation.rotate_rows, rows, dim=0)

    @torch.no_grad()
    def bake(self) -> None:
        """Put the online Hadamard's counterpart into the weight, in place on any shard of rows, and switch it on."""
        if self._unbaked is not None:
            self.online, self._unbaked = self._unbaked, None
            rows = local_rows(self.weight)
            rows.copy_(self.online(rows.to(torch.promote_types(rows.dtype, torch.float32))))

    def merged(self) -> dict[str, Tensor]:
        """Return weight and bias with the rotations baked in (the whole parameters must be gathered)."""
        with self.mode.set(rotate=True, quantize=False):
            weight, bias = self._rotated_weight(), self._rotated_bias()
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def release(self) -> None:
        """Let go of the rotations' handles."""
        self.input_rotation = self.output_rotation = None


_OFF = FakeQuantizer(QuantSpec())


def _tokens(x: Tensor) -> int:
    """Count one block's tokens, which, unlike the batch, do not depend on how many ranks and steps divide it."""
    return x.shape[-2] if x.ndim > 1 else 1


def _on_rows(rows: ValueRows | None, function: Callable[[Tensor], Tensor], tensor: Tensor, *, dim: int) -> Tensor:
    """Apply a function that keeps shapes to some indices of the first or the last dimension (None: to all)."""
    if rows is None:
        return function(tensor)
    outer, inner = (0, 1) if dim == 0 else (-2, -1)
    blocks = torch.unflatten(tensor, dim, (rows.num_blocks, -1))
    sizes = [rows.start, rows.stop - rows.start, blocks.shape[inner] - rows.stop]
    before, chosen, after = torch.split(blocks, sizes, dim=inner)
    changed = torch.unflatten(function(chosen.flatten(outer, inner)), dim, (rows.num_blocks, -1))
    return torch.cat([before, changed, after], dim=inner).flatten(outer, inner)
