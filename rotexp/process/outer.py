"""Ranks that somebody else started: torchrun by its variables, SLURM's srun by its own. Needs no torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_ID")

FIRST_PORT, NUM_PORTS = 20000, 20000
"""Ports from which a SLURM job chooses by its number."""


def adopt(environment: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the variables of the rank that this process already is, in torchrun's names, or None if it is none.

    Raises:
        ValueError: SLURM started several tasks, but the name of the first node cannot be found.
    """
    if all(name in environment for name in TORCHRUN):
        return {name: environment[name] for name in TORCHRUN}
    if all(name in environment for name in SLURM) and int(environment["SLURM_NTASKS"]) > 1:
        return _from_slurm(environment)
    return None


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the one that speaks to people."""
    return environment.get("RANK", environment.get("SLURM_PROCID", "0")) == "0"


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    tasks, nodes = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NNODES", "1"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_node(environment, nodes=nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + int(environment["SLURM_JOB_ID"]) % NUM_PORTS),
    }


def _first_node(environment: Mapping[str, str], *, nodes: int) -> str:
    if nodes == 1:
        return "localhost"
    listed = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"SLURM_JOB_NODELIST={listed}: scontrol cannot expand it ({error}); set MASTER_ADDR") from None
    return answer.stdout.split()[0]
