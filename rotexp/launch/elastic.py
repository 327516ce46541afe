"""Ranks as processes of this machine, by torch elastic's in-process API."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rotexp.config import Config
from rotexp.inputs import Inputs
from rotexp.launch.rank import run_rank
from rotexp.launch.signals import Interrupted

_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """The first rank that failed, and why."""


def run_elastic(config: Config, inputs: Inputs, folder: Path, *, nproc: int) -> None:
    """Run the experiment on `nproc` ranks; when one fails or a signal comes, end all of them.

    Raises:
        RankError: a rank failed.
        Interrupted: a signal ended the run.
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
    except SignalException as error:
        raise Interrupted(error.sigval) from None


@record
def _recorded_rank(config: Config, inputs: Inputs, folder: Path) -> None:
    """Run a rank, leaving its failure in the file that the parent reads."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once and silently: the parent says what happened
    _die_with_parent()
    run_rank(config, inputs, folder)


def _die_with_parent() -> None:
    """Ask Linux to kill this rank when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _reason(failure: ProcessFailure) -> str:
    """Return the last line of what a rank left behind."""
    message: Any = failure.message
    text = message.get("message", str(message)) if isinstance(message, dict) else str(message)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("PhaseError: ") if lines else f"ended with exit code {failure.exitcode}"
