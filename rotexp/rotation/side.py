"""Counts what rotating activations or weights costs, and chooses the cheaper side by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Side(Enum):
    """What is rotated: the tokens' activations, or the weight."""

    tokens = "tokens"
    weight = "weight"


@dataclass(frozen=True)
class LinearShape:
    """The sizes of one linear and of its rotations.

    Attributes:
        inputs, outputs: the weight is (outputs, inputs).
        input_order: n of an input rotation made of (n, n) blocks; 0 for none.
        output_order: likewise for the output rotation.
        rotated_outputs: how many outputs the output rotation acts on; None for all.
    """

    inputs: int
    outputs: int
    input_order: int = 0
    output_order: int = 0
    rotated_outputs: int | None = None

    @property
    def for_columns(self) -> int:
        """The multiply-adds of `W R`."""
        return self.outputs * self.inputs * self.input_order

    @property
    def for_rows(self) -> int:
        """The multiply-adds of `Lᵀ W`."""
        return self.turned * self.inputs * self.output_order

    @property
    def turned(self) -> int:
        """How many outputs the output rotation acts on."""
        return self.outputs if self.rotated_outputs is None else self.rotated_outputs


def token_side(linears: Sequence[LinearShape], *, tokens: int, learned: bool) -> int:
    """Count the multiply-adds, beyond the plain linears', of rotating the activations around linears of one input.

    The input is rotated once for all of them. Learned rotations cost it twice more, for the gradients of the activation
    and of the matrix.
    """
    width = linears[0].inputs * max(linear.input_order for linear in linears)
    width += sum(linear.turned * linear.output_order for linear in linears)
    return tokens * width * (3 if learned else 1)


def weight_side(linears: Sequence[LinearShape], *, tokens: int, learned: bool, recomputed: bool = True) -> int:
    """Count the multiply-adds, beyond the plain linears', of rotating the weights, each on its own.

    Learned rotations cost the weight's gradient `Gᵀ x`, the products with it, and the rotated weight once more unless
    it is kept.

    Args:
        linears: those that read one input.
        tokens: how many rows the input has.
        learned: whether the rotations get gradients.
        recomputed: whether the backward pass rotates the weight anew (it does unless integer codes are kept).
    """
    return sum(_on_weight(linear, tokens=tokens, learned=learned, recomputed=recomputed) for linear in linears)


def _on_weight(linear: LinearShape, *, tokens: int, learned: bool, recomputed: bool) -> int:
    rotation = linear.for_columns + linear.for_rows
    if not learned or not rotation:
        return rotation
    between = linear.for_columns + linear.for_rows if linear.for_columns and linear.for_rows else 0  # W R and L D
    gradients = tokens * linear.outputs * linear.inputs + rotation + between
    return rotation * (2 if recomputed else 1) + gradients


def cheaper_side(linears: Sequence[LinearShape], *, tokens: int, learned: bool) -> Side:
    """Choose for unquantized linears that read one input; on a tie the tokens.

    The choice depends on shapes alone, so that ranks with equal shapes choose alike. Quantized weights must be rotated.
    """
    on_tokens = token_side(linears, tokens=tokens, learned=learned)
    on_weights = weight_side(linears, tokens=tokens, learned=learned)
    return Side.weight if on_weights < on_tokens else Side.tokens
