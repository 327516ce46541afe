"""One sharded weight of which every rank rotates and quantizes its own rows, and of which codes are gathered.

FSDP2 asks a sharded tensor with `fsdp_pre_all_gather` and `fsdp_post_all_gather` what to gather and what to make of it.
Here it gathers codes and shows the linear `Q(Lᵀ W R)`. The gradient of that is a weight's as any other: FSDP2
averages it into each rank's rows, where it becomes the rank's share in the rotations' gradients. So all that takes n
multiplications a weight is divided by the ranks, and a code takes a quarter of a float32 weight's bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotexp.quant.encoded import decode_into
from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.bank import Rotation
from rotexp.rotation.mode import Mode
from rotexp.rotation.own_rows.rows import OwnRows


class DividedWeight:
    """One weight, as FSDP2 gathers it: quantized while the model rotates and quantizes, and elsewhere as it is."""

    def __init__(self, parameter: Any, own: OwnRows, *, quantizer: FakeQuantizer, mode: Mode) -> None:
        """Take FSDP2's parameter, what rotates its rows, and the quantizer of the whole weight."""
        self.own = own
        self.quantizer = quantizer
        self.mode = mode
        self._quantized = False
        self._scale: Tensor | None = None
        self._parameter = parameter
        self._sums: dict[str, Tensor] = {}
        self._hook: Any = None

    @property
    def quantized(self) -> bool:
        """Whether the weight that the linear has at present is `Q(Lᵀ W R)`."""
        wanted = self.mode.rotate and self.mode.quantize
        assert wanted or not self._quantized, "the mode changed while quantized weights stay gathered"
        return self._quantized

    @property
    def scale(self) -> Tensor:
        """The scales of the weight that the linear has at present, (outputs, groups), if that is quantized."""
        assert self._scale is not None, "nothing quantized has been gathered"
        return self._scale

    @property
    def learned(self) -> list[Rotation]:
        """Its rotations that get gradients."""
        rotations = (self.own.before, self.own.after)
        return [rotation for rotation in rotations if rotation is not None and rotation.matrix.requires_grad]

    def attach(self, sums: dict[str, Tensor]) -> None:
        """Take part in the gathers from now on, and add gradients to the sums, by rotation."""
        self._sums = sums
        if self.quantizer.clip_ratios is not None:
            shares = self.quantizer.clip_ratios.chunk(self.own.ranks.world_size)
            self.own.quantizer.clip_ratios = shares[self.own.ranks.rank]
        local = self._local()
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self.fsdp_pre_all_gather, self.fsdp_post_all_gather
        self._forget_gathered()
        weight = self._parameter.sharded_param
        if self.learned:
            weight.requires_grad_(True)
            self._hook = weight.register_post_accumulate_grad_hook(self._take_gradient)

    def detach(self) -> None:
        """Leave parameter and linear as they were."""
        local = self._local()
        del local.fsdp_pre_all_gather, local.fsdp_post_all_gather
        self._forget_gathered()
        if self._hook is not None:
            self._hook.remove()
        self._parameter.sharded_param.requires_grad_(False)

    def publish_clip_ratios(self) -> None:
        """Give the quantizer of the whole weight the ratios in use, those of all ranks' rows (a collective)."""
        own = self.own.quantizer.clip_ratios
        if own is not None:
            ratios = own.new_empty(own.shape[0] * self.own.ranks.world_size, *own.shape[1:])
            self.quantizer.clip_ratios = self.own.ranks.all_gather(ratios, own.contiguous())

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self, _mesh: Any, _outer_size: Any, _outer_stride: Any, _module: Any, _mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], bool]:
        """Return this rank's part of what is gathered, and whether that is codes and scales."""
        quantized = self.mode.rotate and self.mode.quantize
        rows = self._rows()
        gathered = self.own.encode(rows).bounded() if quantized else (rows,)
        if len(gathered) != len(self._parameter.all_gather_outputs):
            self._parameter.all_gather_outputs = []  # FSDP2 would keep those of the other kind
        return gathered, quantized

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: bool,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the weight of what was gathered, in `out` if that is given, and free the rest."""
        self._quantized = metadata
        weight = all_gather_outputs[0].new_empty(all_gather_outputs[0].shape, dtype=param_dtype) if out is None else out
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(weight):
            if metadata:
                codes, scale = all_gather_outputs
                decode_into(weight, codes, scale, quantizer=self.quantizer.quantizer)
                self._scale = scale.clone()
            else:
                weight.copy_(all_gather_outputs[0])
        for tensor in all_gather_outputs:
            tensor.untyped_storage().resize_(0)
        return (weight, (weight,)) if out is None else None

    @torch.no_grad()
    def _take_gradient(self, weight: Tensor) -> None:
        """Turn the mean gradient of this rank's rows into its share in the rotations' gradients, and drop it.

        A later mean over the world adds up what the ranks of one replica have, as if all of them had the sum.
        """
        gradient, weight.grad = weight.grad, None
        assert self._quantized, "a gradient reached a weight that is not quantized"
        assert isinstance(gradient, DTensor), "the gradient of a sharded weight is sharded"
        found = self.own.gradients(self._rows(), gradient.to_local())
        for name, share in found.items():
            if name in self._sums:
                self._sums[name].add_(share, alpha=self.own.ranks.world_size)

    def _local(self) -> Any:
        """Return the rows that FSDP2 holds, the very object that it asks for the extension."""
        return self._parameter.sharded_param._local_tensor

    def _rows(self) -> Tensor:
        """Return this rank's rows in the dtype in which the weight is gathered."""
        rows: Tensor = self._local().detach()
        return rows.to(getattr(self._parameter, "param_dtype", None) or rows.dtype)

    def _forget_gathered(self) -> None:
        """Let FSDP2 allocate anew what it gathers into, since that changes its form."""
        self._parameter._init_extensions()
        self._parameter.all_gather_outputs = []
        if hasattr(self._parameter, "_unsharded_param"):
            del self._parameter._unsharded_param
