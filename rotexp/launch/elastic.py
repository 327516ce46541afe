"""Ranks as processes of this machine, by torch elastic's in-process API."""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rotexp.config import Config
from rotexp.inputs import Inputs
from rotexp.launch.rank import run_rank
from rotexp.launch.signals import Interrupted

_PR_SET_PDEATHSIG = 1

LINGER_SECONDS = 1.0
"""How long a failed rank stays, so that one that was killed, and left no record, is seen before peers that miss it."""


class RankError(RuntimeError):
    """The first rank that failed, and why."""


def run_elastic(config: Config, inputs: Inputs, folder: Path, *, nproc: int) -> None:
    """Run the experiment on `nproc` ranks; when one fails or a signal comes, end all of them.

    Raises:
        RankError: a rank failed.
        Interrupted: a signal ended the run.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="rotexp-", ignore_cleanup_errors=True) as folder_aside:
        failures = Path(folder_aside)
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
            logs_specs=DefaultLogsSpecs(log_dir=str(failures / "elastic")),  # by default a folder that nobody removes
        )
        try:
            elastic_launch(settings, _run_recorded)(config, inputs, folder, failures)
        except ChildFailedError as error:
            raise RankError(_first_failure(error, failures)) from None
        except SignalException as error:
            raise Interrupted(error.sigval) from None


def _run_recorded(config: Config, inputs: Inputs, folder: Path, failures: Path) -> None:
    """Run a rank; leave its failure where the parent looks, before any other rank can miss it.

    A rank never finalizes its interpreter: a process group's threads that still want it abort then (Python < 3.14).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once and silently: the parent says what happened
    _die_with_parent()
    try:
        run_rank(config, inputs, folder)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".removeprefix("PhaseError: ")
        record = {"time": time.time_ns(), "rank": int(os.environ["RANK"]), "reason": reason}
        (failures / f"{record['rank']}.json").write_text(json.dumps(record), encoding="utf-8")
        time.sleep(LINGER_SECONDS)
        os._exit(1)
    atexit.register(os._exit, 0)


def _first_failure(error: ChildFailedError, failures: Path) -> str:
    """Return the rank that failed first, and why: the one that a signal killed, or the one with the earliest record."""
    rank, failure = error.get_first_failure()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in failures.glob("*.json")]
    if failure.exitcode < 0 or not records:
        return f"rank {rank}: {failure.message or f'ended with exit code {failure.exitcode}'}"
    first = min(records, key=lambda record: record["time"])
    return f"rank {first['rank']}: {first['reason']}"


def _die_with_parent() -> None:
    """Ask Linux to kill this rank when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
