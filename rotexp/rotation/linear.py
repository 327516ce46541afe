"""A linear that rotates and fake-quantizes in forward, and keeps its weight's name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotexp.models.arch import ValueRows
from rotexp.orthogonal.hadamard import HadamardTransform
from rotexp.quant.coded_input import code_input
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.integer_products import Coded, can_multiply, coded_rows, has_int8_form
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import Rotation
from rotexp.rotation.coded_products import coded_linear, coded_values_linear, multiply
from rotexp.rotation.linear_shape import LinearShape
from rotexp.rotation.mode import Mode
from rotexp.rotation.own_rows.weight import DividedWeight
from rotexp.rotation.products import rotate_rows, rotate_weight, rotated_linear
from rotexp.rotation.shared_input import SharedInput
from rotexp.rotation.within import quantize_within
from rotexp.sharding.local_rows import local_rows


class RotatedLinear(nn.Module):
    """A linear between two rotated bases, its weight and input fake-quantized.

    With input rotation R and output rotation L it computes `Q(x) Q(Lᵀ W R)ᵀ + Lᵀ b` from `weight` W (outputs, inputs)
    and `bias` b; with an online Hadamard H, which takes R's place, `Q(x H) Q(Lᵀ W H)ᵀ + Lᵀ b`. An R that acts within
    the quantizer (see `rotexp.rotation.within`) finds x unrotated: `Q(x R) Rᵀ Wᵀ`, and such an L leaves the output as
    it is. Weights are rotated to be quantized, and activations elsewhere. Gradients reach the bank, x and whatever else
    is trained.

    Attributes:
        input_rotation, output_rotation: None once merged, or where no rotation acts.
        output_rows: which outputs the output rotation acts on (None: all).
        online: None until `bake` has put H into W.
        keep_codes: whether the backward finds the quantized weight as codes, or forms it once more.
        divided: what quantizes the weight before it is gathered, where ranks do so each for its own rows.
        integer_products: whether codes may be multiplied as integers, where formats, sizes and the CPU allow it.
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
        integer_products: bool = True,
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
        self.keep_codes = True
        self.divided: DividedWeight | None = None
        self.reuse = False
        self._kept: Tensor | Coded | None = None
        self.integer_products = integer_products
        self.shared = SharedInput() if shared is None else shared
        self._reader = self.shared.join()

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (..., inputs) to (..., outputs)."""
        if self.online is not None:
            x = self.online(x)
        quantized = self._quantizes_weight
        if quantized and self.multiplies_integers(x):
            return self._multiply_codes(x)
        x = self.shared(
            x,
            reader=self._reader,
            kind=(self.mode.quantize, self.mode.rotate, quantized, self.input_quantizer.spec),
            compute=self._prepare,
        )
        if self.divided is not None and self.divided.quantized:
            return F.linear(x, self.weight, self._rotated_bias())
        if quantized and self.reuse:
            return F.linear(x, self._quantized_weight(), self._rotated_bias())
        if quantized:
            return rotated_linear(x, **self._rotated_and_quantized())
        y, after = F.linear(x, self.weight, self.bias), self.output_rotation
        return _rotate_outputs(y, after, self.output_rows) if self.mode.turns(after) else y

    @property
    def _quantizes_weight(self) -> bool:
        return self.mode.quantize and self.weight_quantizer.spec.enabled

    def multiplies_integers(self, x: Tensor) -> bool:
        """Return whether x and the weight, both quantized, are multiplied as codes on integer units."""
        if not self.integer_products or x.dtype != self.weight.dtype:
            return False
        outputs, inputs = self.weight.shape
        quantizers = (self.weight_quantizer, self.input_quantizer)
        return all(has_int8_form(quantizer, inputs) for quantizer in quantizers) and can_multiply(x, outputs=outputs)

    def _multiply_codes(self, x: Tensor) -> Tensor:
        """Quantize x and weight, and multiply their codes."""
        coded = self.shared(
            x,
            reader=self._reader,
            kind=("codes", self.input_quantizer.spec),
            compute=lambda x: code_input(x, self.input_quantizer),
        )
        if self.divided is not None and self.divided.quantized:
            return coded_values_linear(coded, weight=self.weight, scale=self.divided.scale, bias=self._rotated_bias())
        if self.reuse and not torch.is_grad_enabled():
            return multiply(coded, self._coded_weight(), self._rotated_bias())
        return coded_linear(coded, **self._rotated_and_quantized())

    def _prepare(self, x: Tensor) -> Tensor:
        """Quantize the input, and rotate it back for a weight that is not rotated itself."""
        if self.mode.acts_within(self.input_rotation):
            return quantize_within(x, self.input_rotation, self.input_quantizer)
        x = self.input_quantizer(x) if self.mode.quantize else x
        if self._quantizes_weight or not self.mode.turns(self.input_rotation):
            return x
        return self.input_rotation.unrotate(x)

    def _rotated_and_quantized(self) -> dict[str, Any]:
        """Return what makes the rotated and quantized weight, for `rotated_linear` and `coded_linear` alike."""
        rotate = self.mode.rotate
        return {
            "weight": self.weight,
            "bias": self._rotated_bias(),
            "quantizer": self.weight_quantizer,
            "input_rotation": _matrix(self.input_rotation) if rotate else None,
            "output_rotation": _matrix(self.output_rotation) if rotate else None,
            "output_rows": self.output_rows,
            "keep_codes": self.keep_codes,
        }

    def shape(self) -> LinearShape:
        """Return the sizes of the weight and of its rotations."""
        outputs, inputs = self.weight.shape
        before, after = (0 if r is None else r.matrix.shape[-1] for r in (self.input_rotation, self.output_rotation))
        rows = self.output_rows
        rotated = None if rows is None else rows.num_blocks * (rows.stop - rows.start)
        return LinearShape(inputs, outputs, before, after, rotated)

    def _quantized_weight(self) -> Tensor:
        if not isinstance(self._kept, Tensor):
            self._kept = self.weight_quantizer(self._rotated_weight())
        return self._kept

    def _coded_weight(self) -> Coded:
        if not isinstance(self._kept, Coded):
            self._kept = coded_rows(self.weight_quantizer.encode_codes(self._rotated_weight()))
        return self._kept

    @property
    def sides(self) -> tuple[str, str]:
        """What rotates input and output, by name; empty where nothing does."""
        rotations = (self.input_rotation, self.output_rotation)
        names = [rotation.name if rotation else "" for rotation in rotations]
        online = self.online or self._unbaked
        part = "" if self.output_rows is None or not names[1] else " (values)"
        return (f"R4: H{online.order}, online" if online else names[0]), names[1] + part

    @property
    def weight_quantizers(self) -> dict[str, FakeQuantizer]:
        """The quantizer of each weight, by the weight's name."""
        return {"weight": self.weight_quantizer}

    @property
    def searching_quantizers(self) -> list[FakeQuantizer]:
        """The quantizers that keep clip ratios: the whole weight's, and that of this rank's rows if it is divided."""
        return [self.weight_quantizer, *([] if self.divided is None else [self.divided.own.quantizer])]

    def quantized_widths(self) -> list[tuple[str, QuantSpec, int]]:
        """Return for weights and activations their quantizer's spec and the width it divides into groups."""
        width = self.weight.shape[1]
        return [("weights", self.weight_quantizer.spec, width), ("activations", self.input_quantizer.spec, width)]

    def refresh(self) -> None:
        """Forget the cached clip ratios."""
        self.weight_quantizer.refresh()
        if self.divided is not None:
            self.divided.own.refresh()

    def keep_quantized_weight(self, reuse: bool) -> None:
        """Use the next forward's quantized weight again in those after it, or (False) forget it."""
        self.reuse, self._kept = reuse, None

    def _rotated_weight(self) -> Tensor:
        weight: Tensor = self.weight
        if not self.mode.rotate:
            return weight
        before, after = _matrix(self.input_rotation), _matrix(self.output_rotation)
        return rotate_weight(weight, before=before, after=after, rows=self.output_rows)

    def _rotated_bias(self) -> Tensor | None:
        rotation = self.output_rotation
        if self.bias is None or rotation is None or not self.mode.rotate:
            return self.bias
        return rotate_rows(self.bias.unsqueeze(-1), rotation.matrix, rows=self.output_rows).squeeze(-1)

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


def _matrix(rotation: Rotation | None) -> Tensor | None:
    return None if rotation is None else rotation.matrix


def _rotate_outputs(y: Tensor, rotation: Rotation, rows: ValueRows | None) -> Tensor:
    """Rotate some outputs of y: (..., outputs), or all."""
    if rows is None:
        return rotation.rotate(y)
    blocks = torch.unflatten(y, -1, (rows.num_blocks, -1))
    sizes = [rows.start, rows.stop - rows.start, blocks.shape[-1] - rows.stop]
    before, chosen, after = torch.split(blocks, sizes, dim=-1)
    rotated = torch.unflatten(rotation.rotate(chosen.flatten(-2)), -1, (rows.num_blocks, -1))
    return torch.cat([before, rotated, after], dim=-1).flatten(-2)
