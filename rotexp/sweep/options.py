"""The options of a sweep: how its jobs run."""

from __future__ import annotations

from dataclasses import dataclass

from rotexp.errors.requirements import require


@dataclass(frozen=True)
class SweepConfig:
    """How the jobs of a sweep run.

    Attributes:
        jobs_at_once: on this machine, each with its share of the accelerators and cores.
        fail_fast: whether the first job that fails ends the sweep.
        optimized_metric: where in summary.json the figure stands that a sweeper such as Optuna minimizes.
    """

    jobs_at_once: int = 1
    fail_fast: bool = False
    optimized_metric: str = "evaluation.trained.perplexity"

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        require(self.jobs_at_once >= 1, "sweep.jobs_at_once", self.jobs_at_once, "at least 1", "leave it out")
