"""The options of launching: who starts the ranks, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rotexp.errors.requirements import require


class LaunchKind(Enum):
    """Who starts the ranks."""

    auto = "auto"
    inline = "inline"
    elastic = "elastic"


@dataclass(frozen=True)
class LaunchConfig:
    """Who starts the ranks, and how many.

    Attributes:
        kind: who starts the ranks; `auto` starts them by torch elastic where there are several.
        nproc: ranks on this node.
        nnodes: nodes, on each of which the same command is started.
        rdzv_endpoint: HOST:PORT where several nodes meet, on one of them.
        rdzv_id: what the nodes of one run call it.
        threads: of each rank (None: the cores divided by the ranks; under `numerics=exact` training proves first that
            their number changes nothing).
        timeout_minutes: how long nodes wait for each other at the start, and ranks in a collective.
        grace_seconds: how long a run may take to save and end after SIGTERM, SIGUSR1 or SIGUSR2; then it is killed. A
            launcher or scheduler outside that kills sooner (torchrun and SLURM by default after 30 s) leaves less.
    """

    kind: LaunchKind = LaunchKind.auto
    nproc: int | None = None
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str = "rotexp"
    threads: int | None = None
    timeout_minutes: float = 30.0
    grace_seconds: float = 60.0

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        for name in ("nproc", "threads"):
            value = getattr(self, name)
            require(
                value is None or value >= 1, f"launch.{name}", value, "at least 1 or null", "null decides by itself"
            )
        require(self.nnodes >= 1, "launch.nnodes", self.nnodes, "at least 1", "1 is this machine alone")
        if self.nnodes > 1:
            require(
                self.kind is LaunchKind.elastic and bool(self.rdzv_endpoint),
                "launch.nnodes",
                self.nnodes,
                "1 unless launch=elastic and launch.rdzv_endpoint=HOST:PORT are given",
                "give both, or start the nodes by torchrun or srun",
            )
        minutes = self.timeout_minutes
        require(0 < minutes <= 1e6, "launch.timeout_minutes", minutes, "above 0 and at most 1e6", "the default is 30")
        grace = self.grace_seconds
        require(0 < grace <= 1e6, "launch.grace_seconds", grace, "above 0 and at most 1e6", "the default is 60")
        if self.kind is LaunchKind.inline:
            require(self.nproc in (None, 1), "launch.nproc", self.nproc, "1 for launch=inline", "use launch=elastic")
