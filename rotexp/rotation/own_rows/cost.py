"""Counts what a sharded, quantized weight costs ranks that rotate it whole, and such as rotate only their rows."""

from __future__ import annotations

from dataclasses import dataclass

from rotexp.rotation.linear_shape import LinearShape

GRADIENT_BYTES = 4


def multiply_adds_per_byte(device_type: str) -> int:
    """Return how many multiply-adds in float32 a byte over the wire is worth.

    CPUs were measured by gloo within a machine (50 thousand million a second, 1 GB/s). Accelerators do up to 30
    million million and receive 300 GB/s within a node or 50 GB/s between nodes; this is nearer to the latter.
    """
    return 50 if device_type == "cpu" else 500


@dataclass(frozen=True)
class Work:
    """What one rank does for one weight in a step of one forward and backward: multiply-adds, and bytes received."""

    multiply_adds: float
    received_bytes: float


@dataclass(frozen=True)
class ShardedShape:
    """One linear and how its weight is sharded.

    Attributes:
        ranks: that share the weight by rows.
        replicas: of each share.
        gathers: how often the weight is gathered in a step.
        element_bytes: of one weight, as it is gathered.
        scales: of a quantized row.
        exchanged: whether ranks have to exchange rows for columns to rotate the output.
        learned: whether a rotation gets gradients.
        multiply_adds_per_byte: what bytes are weighed with.
    """

    linear: LinearShape
    ranks: int
    replicas: int
    gathers: int
    element_bytes: int
    scales: int
    exchanged: bool
    learned: bool
    multiply_adds_per_byte: int

    @property
    def is_cheaper_divided(self) -> bool:
        """Whether it costs less to let every rank rotate its own rows; sizes alone decide, so ranks agree."""
        return self._cost(self.divided()) < self._cost(self.whole())

    def _cost(self, work: Work) -> float:
        return work.multiply_adds + work.received_bytes * self.multiply_adds_per_byte

    @property
    def _weights(self) -> int:
        return self.linear.outputs * self.linear.inputs

    @property
    def _away(self) -> float:
        """Which share of what is gathered, scattered or exchanged is another rank's."""
        return (self.ranks - 1) / self.ranks

    def whole(self) -> Work:
        """Count for ranks that gather the weight and rotate all of it, anew after every gather."""
        bytes_gathered = self.gathers * self._weights * self.element_bytes
        return Work(self._products(forwards=self.gathers), bytes_gathered * self._away)

    def divided(self) -> Work:
        """Count for ranks that rotate their own rows once, gather codes and scales, and reduce the gradient."""
        codes = self.gathers * (self._weights + 4 * self.linear.outputs * self.scales)
        gradient = self._weights * GRADIENT_BYTES * self.learned
        between_replicas = 2 * gradient / self.ranks * (self.replicas - 1) / self.replicas
        received = (codes + gradient) * self._away + between_replicas + self._exchanged_bytes()
        return Work(self._products(forwards=1) / self.ranks, received)

    def _products(self, *, forwards: int) -> int:
        """Count the multiply-adds of `Lᵀ W R`, and of W R for dL, L D for dR, dL and dR."""
        linear = self.linear
        columns = self._weights * linear.input_order
        rows = linear.rotated_rows * linear.inputs * linear.output_order
        between = columns + rows if columns and rows else 0
        return forwards * (columns + rows) + (columns + rows + between) * self.learned

    def _exchanged_bytes(self) -> float:
        """Count rows for columns and back: the weight, and then what its gradient is derived from."""
        if not self.exchanged:
            return 0.0
        there_and_back = 2 * self.element_bytes + (2 + bool(self.linear.input_order)) * GRADIENT_BYTES * self.learned
        return there_and_back * self._weights / self.ranks * self._away
