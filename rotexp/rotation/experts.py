"""Experts whose three-dimensional weights are rotated and fake-quantized in forward, and keep their names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotexp.orthogonal.hadamard import HadamardTransform
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import Rotation
from rotexp.rotation.mode import Mode
from rotexp.rotation.quantizers import fake_quantizer
from rotexp.rotation.within import quantize_within
from rotexp.sharding.local_rows import local_rows


class RotatedExperts(nn.Module):
    """Gated experts between two rotated bases; takes the place of a Hugging Face module of the same parameters.

    Expert e computes `down(act(gate(x)) * up(x))` with `gate_up_proj[e]`: (2 * inner, hidden), gate above up, and
    `down_proj[e]`: (hidden, inner); hidden is rotated by `residual`, inner by the online Hadamard.

    Attributes:
        residual: None once merged, or where no rotation acts.
        online: None until `bake` has put the Hadamard into `down_proj`.
    """

    def __init__(
        self,
        experts: Any,
        *,
        mode: Mode,
        weights: QuantSpec,
        activations: QuantSpec,
        residual: Rotation | None,
        online: HadamardTransform | None,
    ) -> None:
        super().__init__()
        self.gate_up_proj: nn.Parameter = experts.gate_up_proj
        self.down_proj: nn.Parameter = experts.down_proj
        self.act_fn = experts.act_fn
        self.mode = mode
        names = ("gate_up_proj", "down_proj")
        self.weight_quantizers = {name: fake_quantizer(weights, key="quant.weights") for name in names}
        self.input_quantizer = fake_quantizer(activations, key="quant.activations")
        self.residual = residual
        self.online: HadamardTransform | None = None
        self._unbaked = online
        self.reuse = False
        self._kept: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Mix the chosen experts' outputs.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: (tokens, k), int64, the experts of each token.
            top_k_weights: (tokens, k), their shares.

        Returns:
            (tokens, hidden).
        """
        quantized = self.mode.quantize and self.weight_quantizers["down_proj"].spec.enabled
        rotation = self.residual if self.mode.turns(self.residual) and not quantized else None
        if self.mode.acts_within(self.residual):
            x = quantize_within(hidden_states, self.residual, self.input_quantizer)
        else:
            x = self._quantize(hidden_states)
            x = x if rotation is None else rotation.unrotate(x)
        weights = self._quantized_weights() if quantized else (self.gate_up_proj, self.down_proj)
        gate_up, down = (weight.unbind() for weight in weights)  # one gradient for all, not a whole one for each
        mixed = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            tokens, place = torch.where(top_k_index == expert)
            output = self._expert(x[tokens], gate_up[expert], down[expert]) * top_k_weights[tokens, place, None]
            mixed = mixed.index_add(0, tokens, output.to(mixed.dtype))
        return mixed if rotation is None else rotation.rotate(mixed)

    def _expert(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        inner = self.act_fn(gate) * up
        if self.online is not None:
            inner = self.online(inner)
        return F.linear(self._quantize(inner), down)

    def _quantize(self, x: Tensor) -> Tensor:
        return self.input_quantizer(x) if self.mode.quantize else x

    def _quantized_weights(self) -> tuple[Tensor, Tensor]:
        if self._kept is not None:
            return self._kept
        rotated = self._rotated()
        gate_up, down = (quantizer(rotated[name]) for name, quantizer in self.weight_quantizers.items())
        if self.reuse:
            self._kept = gate_up, down
        return gate_up, down

    def _rotated(self) -> dict[str, Tensor]:
        rotation = self.residual if self.mode.rotate else None
        if rotation is None:
            return {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        # Rᵀ W of every expert; contiguous, since products with another layout round otherwise than once merged
        down = rotation.rotate(self.down_proj.mT).mT.contiguous()
        return {"gate_up_proj": rotation.rotate(self.gate_up_proj), "down_proj": down}

    @property
    def sides(self) -> tuple[str, str]:
        """What rotates input and output, by name; empty where nothing does."""
        name, online = self.residual.name if self.residual else "", self.online or self._unbaked
        return (f"{name}; down R4: H{online.order}, online" if online else name), name

    @property
    def searching_quantizers(self) -> list[FakeQuantizer]:
        """The quantizers that keep clip ratios of the weights."""
        return list(self.weight_quantizers.values())

    def quantized_widths(self) -> list[tuple[str, QuantSpec, int]]:
        """Return for weights and activations their quantizer's spec and each width it divides into groups."""
        widths = self.gate_up_proj.shape[-1], self.down_proj.shape[-1]
        specs = {"weights": self.weight_quantizers["down_proj"].spec, "activations": self.input_quantizer.spec}
        return [(kind, spec, width) for kind, spec in specs.items() for width in widths]

    def refresh(self) -> None:
        """Forget the cached clip ratios."""
        for quantizer in self.weight_quantizers.values():
            quantizer.refresh()

    def keep_quantized_weight(self, reuse: bool) -> None:
        """Use the next forward's quantized weights again in those after it, or (False) forget them."""
        self.reuse, self._kept = reuse, None

    @torch.no_grad()
    def bake(self) -> None:
        """Put the online Hadamard's counterpart into `down_proj`, in place on any shard, and switch it on."""
        if self._unbaked is not None:
            self.online, self._unbaked = self._unbaked, None
            rows = local_rows(self.down_proj)
            rows.copy_(self.online(rows.to(torch.promote_types(rows.dtype, torch.float32))))

    def merged(self) -> dict[str, Tensor]:
        """Return both weights with the rotation baked in (the whole parameters must be gathered)."""
        with self.mode.set(rotate=True, quantize=False):
            return self._rotated()

    def release(self) -> None:
        """Let go of the rotation's handle."""
        self.residual = None
