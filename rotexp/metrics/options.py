"""The options of measurements: held-out windows, and how often the costlier figures are taken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rotexp.errors.requirements import require

OnDivergence = Enum("OnDivergence", ["log", "raise", "rebroadcast"])
"""What to do when replicas of a rotation differ (`raise` is no identifier, hence this form)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out figures on non-overlapping windows.

    Attributes:
        window: in tokens.
        max_windows: None for every one the text holds.
        micro_batch_size: windows a forward; figures differ by rounding (None: as many as have 256 tokens on a CPU, 8192
            on an accelerator if they fit, but an eighth of the windows, and a rank's share of them, at most; under
            `numerics=exact` as on a CPU, whatever the ranks).
        share_rows: whether figures of the untrained model are taken over from another run of the same sweep that has
            measured the very same, which is known by a digest; `rotexp.evaluate` shares nothing.
        every: steps between two measurements of what is trained, by whose loss the best is then chosen, before the
            first step and after the last too (None: none, and the best is chosen by the loss of a step's own batch).
            Where weights are whole it takes the memory of quantized ones beside them, as evaluation does.
    """

    window: int = 256
    max_windows: int | None = 64
    micro_batch_size: int | None = None
    every: int | None = None
    share_rows: bool = True

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        windows = self.max_windows
        require(self.window >= 2, "evaluation.window", self.window, "at least 2", "lengthen it")
        require(windows is None or windows >= 1, "evaluation.max_windows", windows, "at least 1 or null", "enlarge it")
        micro = self.micro_batch_size
        require(
            micro is None or micro >= 1, "evaluation.micro_batch_size", micro, "at least 1 or null", "null chooses it"
        )
        every = self.every
        require(
            every is None or every >= 1, "evaluation.every", every, "at least 1 or null", "null measures at the end"
        )


@dataclass(frozen=True)
class MetricsConfig:
    """How often, in steps, the costlier figures are taken: rotations' drift and replicas' divergence.

    Attributes:
        rotation_every: steps between two measurements of the drift.
        divergence_every: steps between two comparisons of the replicas.
        on_divergence: what to do when replicas of a rotation differ.
    """

    rotation_every: int = 10
    divergence_every: int = 10
    on_divergence: OnDivergence = OnDivergence["raise"]

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        for key in ("rotation_every", "divergence_every"):
            value = getattr(self, key)
            require(value >= 1, f"metrics.{key}", value, "at least 1", "1 takes it every step")
