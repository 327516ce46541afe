"""Ranks as processes of this machine, by torch elastic's in-process API."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rotexp.config import Config
from rotexp.inputs import Inputs
from rotexp.launch.rank import run_rank


class RankError(RuntimeError):
    """The first rank that failed, and why."""


def run_elastic(config: Config, inputs: Inputs, folder: Path, *, nproc: int) -> None:
    """Run the experiment on `nproc` ranks; when one fails, end the others.

    Raises:
        RankError: a rank failed.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        elastic_launch(settings, _recorded_rank)(config, inputs, folder)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankError(f"rank {rank}: {_reason(failure)}") from None


@record
def _recorded_rank(config: Config, inputs: Inputs, folder: Path) -> None:
    """Run a rank, leaving its failure in the file that the parent reads."""
    run_rank(config, inputs, folder)


def _reason(failure: object) -> str:
    message = getattr(failure, "message", "")
    text = message.get("message", str(message)) if isinstance(message, dict) else str(message)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    exit_code = getattr(failure, "exitcode", None)
    return lines[-1] if lines else f"ended with exit code {exit_code}"
