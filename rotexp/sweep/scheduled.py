"""What a job of a sweep does beside training when a scheduler (SLURM, Ray) started its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from rotexp.config.schema import Config
from rotexp.runfolder.records import readable_summary
from rotexp.sweep.outcome import Job, figure, finished_before


def is_done(config: Config, folder: Path) -> bool:
    """Return whether the folder holds this very run, done.

    Raises:
        ValueError: it holds another run, which is done.
    """
    return finished_before(Job(folder.name, {}, folder, config)) is not None


def optimized_metric(folder: Path, path: str) -> float | None:
    """Return the figure of a run's summary that a sweeper minimizes, None if there is none.

    Args:
        path: `sweep.optimized_metric`.
    """
    return figure(readable_summary(folder), path)


def ask_for_requeue(environment: Mapping[str, str] = os.environ) -> None:
    """Let submitit put an interrupted job back into SLURM's queue, as its own handler of SIGUSR2 does."""
    if environment.get("SUBMITIT_EXECUTOR") == "slurm":
        os.kill(os.getpid(), signal.SIGUSR2)
