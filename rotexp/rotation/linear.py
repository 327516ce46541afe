"""Linear and embedding layers that rotate and fake-quantize in forward, and keep their weight's name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.bank import Rotation
from rotexp.rotation.hadamard import HadamardTransform
from rotexp.rotation.mode import Mode
from rotexp.sharding.shards import local_rows


class RotatedLinear(nn.Module):
    """A linear between two rotated bases, its weight and input fake-quantized.

    With input rotation R and output rotation L it computes `Q(x) Q(Lᵀ W R)ᵀ + Lᵀ b` from the frozen `weight` W
    (outputs, inputs) and `bias` b; with an online Hadamard H, which takes R's place, `Q(x H) Q(Lᵀ W H)ᵀ + Lᵀ b`.
    Gradients reach the bank and x only.

    Attributes:
        input_rotation, output_rotation: None once merged, or where no rotation acts.
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
        online: HadamardTransform | None = None,
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
        self.online: HadamardTransform | None = None
        self._unbaked = online
        self.reuse = False
        self._kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (..., inputs) to (..., outputs)."""
        if self.online is not None:
            x = self.online(x)
        if self.mode.quantize:
            x = self.input_quantizer(x)
        if self.mode.quantize and self.weight_quantizer.spec.enabled:
            return F.linear(x, self._quantized_weight(), self._rotated_bias())
        return self._rotate_tokens(x)

    def _quantized_weight(self) -> Tensor:
        if not self.reuse:
            return self.weight_quantizer(self._rotated_weight())
        if self._kept is None:
            self._kept = self.weight_quantizer(self._rotated_weight())
        return self._kept

    def keep_quantized_weight(self, reuse: bool) -> None:
        """Use the next forward's quantized weight again in those after it, or (False) forget it."""
        self.reuse, self._kept = reuse, None

    def _rotate_tokens(self, x: Tensor) -> Tensor:
        """Rotate activations instead of the weight, which need not be whole in one basis when it is not quantized."""
        rotate = self.mode.rotate
        if rotate and self.input_rotation is not None:
            x = self.input_rotation.unrotate(x)
        y = F.linear(x, self.weight, self.bias)
        return self.output_rotation.rotate(y) if rotate and self.output_rotation is not None else y

    def _rotated_weight(self) -> Tensor:
        weight: Tensor = self.weight
        if not self.mode.rotate:
            return weight
        if self.input_rotation is not None:
            weight = self.input_rotation.rotate(weight)
        return weight if self.output_rotation is None else self.output_rotation.rotate_rows(weight)

    def _rotated_bias(self) -> Tensor | None:
        if self.bias is None or self.output_rotation is None or not self.mode.rotate:
            return self.bias
        return self.output_rotation.rotate_rows(self.bias)

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


class RotatedEmbedding(nn.Module):
    """An embedding whose rows are rotated after the lookup; `weight`: (vocabulary, hidden), frozen."""

    def __init__(self, embedding: nn.Embedding, *, mode: Mode, rotation: Rotation) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.padding_idx = embedding.padding_idx
        self.mode = mode
        self.rotation: Rotation | None = rotation

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map token_ids: (batch, tokens) to (batch, tokens, hidden)."""
        rows = F.embedding(token_ids, self.weight, self.padding_idx)
        return self.rotation.rotate(rows) if self.mode.rotate and self.rotation is not None else rows

    def merged(self) -> dict[str, Tensor]:
        """Return the weight with the rotation baked in (the whole parameter must be gathered)."""
        return {"weight": self.weight if self.rotation is None else self.rotation.rotate(self.weight)}

    def release(self) -> None:
        """Let go of the rotation's handle."""
        self.rotation = None
