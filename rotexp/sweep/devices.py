"""Which accelerators and how many threads each of several jobs at once may use; needs no torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rotexp.config.schema import Config
from rotexp.launch.options import LaunchKind
from rotexp.sharding.strategies import strategy_of

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_accelerators(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the accelerators that a process of this environment would see, by their numbers or UUIDs."""
    listed = environment.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line[4 : line.index(":")] for line in answer.stdout.splitlines() if line.startswith("GPU ")]


def shares(accelerators: Sequence[str], *, jobs_at_once: int) -> list[tuple[str, ...]]:
    """Return disjoint shares of one size, one for each job that runs at once; empty ones where there is nothing.

    Raises:
        ValueError: there are fewer accelerators than jobs.
    """
    count = len(accelerators)
    if 0 < count < jobs_at_once:
        raise ValueError(
            f"sweep.jobs_at_once={jobs_at_once}: must be at most {count}, the accelerators of this machine; lower it"
        )
    size = count // jobs_at_once
    return [tuple(accelerators[slot * size : (slot + 1) * size]) for slot in range(jobs_at_once)]


def with_share_of_threads(config: Config, *, accelerators: int, jobs_at_once: int) -> Config:
    """Return the configuration with the cores divided by the jobs at once and their ranks, unless it says threads."""
    launch = config.launch
    if launch.threads is not None or jobs_at_once == 1:
        return config
    ranks = launch.nproc or accelerators or strategy_of(config.sharding).minimum_world
    ranks = 1 if launch.kind is LaunchKind.inline else ranks
    threads = max(1, (os.cpu_count() or 1) // jobs_at_once // ranks)
    return replace(config, launch=replace(launch, threads=threads))
