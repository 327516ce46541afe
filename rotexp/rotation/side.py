"""Counts what rotating activations or weights costs, and chooses the cheaper side by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache


class Side(Enum):
    """What a rotation is applied to: the activations of all tokens, or the weight."""

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
    def rotated_rows(self) -> int:
        """How many outputs the output rotation acts on."""
        return self.outputs if self.rotated_outputs is None else self.rotated_outputs


@dataclass(frozen=True)
class Sides:
    """Where linears that read one input rotate it, and where each of them rotates its output."""

    input: Side
    outputs: tuple[Side, ...]


def weight_sides(linears: Sequence[LinearShape]) -> Sides:
    """Return the sides of quantized weights, which have to be rotated."""
    return Sides(Side.weight, (Side.weight,) * len(linears))


@lru_cache(maxsize=1024)
def cheapest_sides(linears: tuple[LinearShape, ...], *, tokens: int) -> Sides:
    """Choose for unquantized linears that read one input and whose rotations are learned; on a tie the tokens.

    The choice depends on shapes alone, so that ranks with equal shapes choose alike.

    Args:
        linears: all that read the input; they rotate it alike, since on the tokens' side it is rotated once for all.
        tokens: how many rows the input has.
    """

    def best(linear: LinearShape, side: Side) -> Side:
        return min(Side, key=lambda output: cost(Sides(side, (output,)), [linear]))

    def cost(sides: Sides, chosen: Sequence[LinearShape]) -> int:
        return multiply_adds(chosen, sides, tokens=tokens, learned=True)

    options = [Sides(side, tuple(best(linear, side) for linear in linears)) for side in Side]
    return min(options, key=lambda sides: cost(sides, linears))


def multiply_adds(linears: Sequence[LinearShape], sides: Sides, *, tokens: int, learned: bool) -> int:
    """Count the multiply-adds of rotating around linears that read one input, beyond those of the plain linears.

    Args:
        linears, sides: as many outputs' sides as linears.
        tokens: how many rows the input has.
        learned: whether the rotations get gradients.
    """
    rows, total = tokens * (3 if learned else 1), 0  # learned: also the gradients of activation and matrix
    if sides.input is Side.tokens:
        total += rows * linears[0].inputs * max(linear.input_order for linear in linears)
        linears = [replace(linear, input_order=0) for linear in linears]
    for linear, side in zip(linears, sides.outputs, strict=True):
        on_tokens = side is Side.tokens
        total += rows * linear.rotated_rows * linear.output_order * on_tokens
        rest = replace(linear, output_order=0) if on_tokens else linear
        total += _on_weight(rest, tokens=tokens, learned=learned)
    return total


def _on_weight(linear: LinearShape, *, tokens: int, learned: bool) -> int:
    """Count `Lᵀ W R` and, if learned, the weight's gradient, the products with it, and the weight once more."""
    columns = linear.outputs * linear.inputs * linear.input_order
    rows = linear.rotated_rows * linear.inputs * linear.output_order
    if not learned or not columns + rows:
        return columns + rows
    between = columns + rows if columns and rows else 0  # W R for dL, and L D for dR
    return 3 * (columns + rows) + between + tokens * linear.outputs * linear.inputs
