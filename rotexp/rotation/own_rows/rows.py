"""Rotates and quantizes the rows of a weight that this rank holds, and derives the rotations' gradients from them.

With input rotation R and output rotation L the gradient D of `Lᵀ W R` gives `dL = (W R) Dᵀ` and `dR = Wᵀ (L D)`. R acts
within rows. L acts within columns: ranks exchange rows for columns and back, unless L's blocks lie within their rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotexp.models.arch import ValueRows
from rotexp.quant.encoded import EncodedTensor
from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.bank import Rotation
from rotexp.rotation.products import columns_gradient, rotate_columns, rotate_rows, rows_gradient
from rotexp.sharding.communication import Communication


@dataclass
class OwnRows:
    """The part of one rank in `Q(Lᵀ W R)` and in its gradients.

    Attributes:
        quantizer: Q, of these rows alone.
        before, after: R and L; None where no rotation acts.
        output_rows: which outputs L acts on (None: all).
        ranks: those that share the weight, equally many rows each.
        within: whether L's blocks lie within the rows of one rank.
    """

    quantizer: FakeQuantizer
    before: Rotation | None
    after: Rotation | None
    output_rows: ValueRows | None
    ranks: Communication
    within: bool
    _kept: tuple[tuple[int, ...], EncodedTensor] | None = field(default=None, init=False)

    def encode(self, rows: Tensor) -> EncodedTensor:
        """Return this rank's rows of the quantized weight, computed anew once a rotation or the clip ratios changed.

        Args:
            rows: (outputs / ranks, inputs), this rank's of W.
        """
        versions = tuple(rotation.matrix._version for rotation in (self.before, self.after) if rotation is not None)
        if self._kept is None or self._kept[0] != versions:
            self._kept = versions, self.quantizer.encode(self._rotate(rows))[1]
        return self._kept[1]

    def forget_codes(self) -> None:
        """Forget what was quantized."""
        self._kept = None

    def refresh(self) -> None:
        """Forget codes and clip ratios."""
        self.forget_codes()
        self.quantizer.refresh()

    def gradients(self, rows: Tensor, for_weight: Tensor) -> dict[str, Tensor]:
        """Return this rank's share in the gradients of the rotations, by name; the shares of all ranks add up.

        Args:
            rows: as in `encode`, whose result still has to hold.
            for_weight: of the shape of `rows`, the gradient of the quantized weight; overwritten.
        """
        passes = self.encode(rows).decode()[1]
        gradient = for_weight if passes is None else for_weight.mul_(passes)
        found: dict[str, Tensor] = {}
        if self.after is not None:
            once = rows if self.before is None else rotate_columns(rows, self.before.matrix)
            if self.within:
                found[self.after.name] = self._within_gradient(once, gradient)
            else:
                once, gradient = self._to_columns(torch.stack([once.to(gradient.dtype), gradient])).unbind()
                found[self.after.name] = rows_gradient(once, gradient, self.after.matrix, rows=self.output_rows)
        if self.before is not None:
            if self.after is not None:
                gradient = self._rotate_outputs_back(gradient)
            found[self.before.name] = columns_gradient(rows, gradient, self.before.matrix)
        return found

    def _rotate(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of `Lᵀ W R`."""
        rotated = rows if self.before is None else rotate_columns(rows, self.before.matrix)
        if self.after is None:
            return rotated
        if self.within:
            return rotate_rows(rotated, self._own_blocks(self.after.matrix, rotated), rows=None)
        columns = rotate_rows(self._to_columns(rotated), self.after.matrix, rows=self.output_rows)
        return self._to_rows(columns)

    def _rotate_outputs_back(self, gradient: Tensor) -> Tensor:
        """Return this rank's rows of `L D`, from its rows of D if L lies within them, and else from its columns."""
        assert self.after is not None, "no output rotation to go back through"
        matrix = self.after.matrix.mT
        if self.within:
            return rotate_rows(gradient, self._own_blocks(matrix, gradient), rows=None)
        return self._to_rows(rotate_rows(gradient, matrix, rows=self.output_rows))

    def _within_gradient(self, once: Tensor, gradient: Tensor) -> Tensor:
        assert self.after is not None, "no output rotation to differentiate"
        matrix = self.after.matrix
        own = rows_gradient(once, gradient, self._own_blocks(matrix, once), rows=None)
        if matrix.ndim == 2:
            return own
        whole = torch.zeros_like(matrix)
        self._own_blocks(whole, once).copy_(own)
        return whole

    def _own_blocks(self, matrix: Tensor, rows: Tensor) -> Tensor:
        """View the blocks of a block-diagonal rotation that act on this rank's rows (a single block acts on all)."""
        if matrix.ndim == 2:
            return matrix
        count = rows.shape[0] // matrix.shape[-1]
        first = self.ranks.rank * count
        return matrix[first : first + count]

    def _to_columns(self, rows: Tensor) -> Tensor:
        """Give rows for columns (a collective): (..., outputs / ranks, inputs) to (..., outputs, inputs / ranks)."""
        sent = torch.unflatten(rows, -1, (self.ranks.world_size, -1)).movedim(-2, 0).contiguous()
        return self.ranks.all_to_all(sent).movedim(0, -3).flatten(-3, -2)

    def _to_rows(self, columns: Tensor) -> Tensor:
        """Give columns for rows (a collective): (outputs, inputs / ranks) to (outputs / ranks, inputs)."""
        sent = torch.unflatten(columns, 0, (self.ranks.world_size, -1)).contiguous()
        return self.ranks.all_to_all(sent).movedim(0, -2).flatten(-2)
