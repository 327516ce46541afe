"""Ranks as processes of this machine, which may be one of several, by torch elastic's in-process API."""

from __future__ import annotations

import atexit
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rotexp.config import Config
from rotexp.inputs import Inputs
from rotexp.launch.outer import adopt, is_first
from rotexp.launch.rank import run_rank
from rotexp.signals import SAVING, Interrupted, end_with_parent

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, (130, 143)
"""Exit codes of a rank."""

FROM_SLURM = "slurm"
"""The `launch.rdzv_endpoint` that SLURM's variables say."""

WAITS = ("join", "read")
"""What nodes that meet wait for: each other, and the answer of the endpoint."""

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
    with _settings(config, nproc=nproc) as (settings, failures):
        try:
            with _forwarding_signals() as forwarded:
                elastic_launch(settings, _run_recorded)(config, inputs, folder, failures)
        except ChildFailedError as error:
            if forwarded and error.get_first_failure()[1].exitcode in _ends_by(forwarded):
                raise Interrupted(forwarded[0]) from None
            raise RankError(_first_failure(error, failures)) from None
        except SignalException as error:
            raise Interrupted(error.sigval) from None


def run_node(config: Config, inputs: Inputs, folder: Path, *, nproc: int, run: Callable[..., int]) -> int:
    """Run this node's ranks of a run on several nodes, which meet at `launch.rdzv_endpoint`; return the exit code.

    The ranks record by themselves how the run ended, in the folder of rank 0, whichever node that is on.

    Args:
        folder: where the run is recorded if rank 0 is on this node.
        run: what a rank does with the configuration, the inputs, that folder and its place in the world, in torchrun's
            variables; it returns the rank's exit code.
    """
    inputs.checkpoint.weights.release()
    with _settings(config, nproc=nproc) as (settings, _):
        try:
            with _forwarding_signals() as forwarded:
                elastic_launch(settings, _run_as_part)(run, config, inputs, folder)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if forwarded and failure.exitcode in _ends_by(forwarded):
                return Interrupted(forwarded[0]).exit_code
            if failure.exitcode < 0:  # it could not say so itself
                sys.stderr.write(f"rotexp: rank {rank}: {failure.message}\n")
            return failure.exitcode if failure.exitcode in (REFUSED, *INTERRUPTED) else FAILED
        except RendezvousError as error:
            where = f"launch.rdzv_endpoint={config.launch.rdzv_endpoint}"
            remedy = f"start the command on {config.launch.nnodes} nodes that reach it"
            sys.stderr.write(f"rotexp: {where}: the nodes did not meet there ({error}); {remedy}\n")
            return FAILED
        except SignalException as error:
            return Interrupted(error.sigval).exit_code
        except Interrupted as interruption:
            return interruption.exit_code
    return DONE


@contextmanager
def _forwarding_signals() -> Iterator[list[int]]:
    """Pass the signals after which a run saves on to the ranks, which then end by themselves; yield those that came.

    Raises:
        Interrupted: there is no rank yet.
    """
    forwarded: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        ranks = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        if not ranks:
            raise Interrupted(number)
        forwarded.append(number)
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in SAVING}
    try:
        yield forwarded
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ends_by(signals: list[int]) -> set[int]:
    """Return the exit codes of ranks that saved at these signals, or had not begun to listen to them."""
    return {Interrupted(signal.SIGTERM).exit_code, *(-number for number in signals)}


@contextmanager
def _settings(config: Config, *, nproc: int) -> Iterator[tuple[LaunchConfig, Path]]:
    """Yield how elastic starts the ranks, and a folder for their failures."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    launch = config.launch
    alone = launch.nnodes == 1
    with tempfile.TemporaryDirectory(prefix="rotexp-", ignore_cleanup_errors=True) as folder_aside:
        failures = Path(folder_aside)
        settings = LaunchConfig(
            min_nodes=launch.nnodes,
            max_nodes=launch.nnodes,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex if alone else launch.rdzv_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0" if alone else _endpoint(launch.rdzv_endpoint),
            rdzv_configs={} if alone else {f"{wait}_timeout": math.ceil(60 * launch.timeout_minutes) for wait in WAITS},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # at the others elastic gives ranks 30 s, too few to save
            logs_specs=DefaultLogsSpecs(log_dir=str(failures / "elastic")),  # by default a folder that nobody removes
        )
        yield settings, failures


def _endpoint(given: str | None) -> str:
    """Return HOST:PORT; for `slurm` the first node of the job, and a port that its number gives."""
    if given != FROM_SLURM:
        return str(given)
    place = adopt()
    if place is None:
        raise ValueError(f"launch.rdzv_endpoint={given}: must be HOST:PORT outside of srun with a task a node; name it")
    return f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}"


def _run_as_part(run: Callable[..., int], config: Config, inputs: Inputs, folder: Path) -> None:
    """Run a rank of several nodes' ranks; as in `_run_recorded`, its interpreter is never finalized."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _die_with_parent()
    try:
        code = run(config, inputs, folder, adopt())
    except ValueError as error:
        code = REFUSED
        if is_first():
            sys.stderr.write(f"rotexp: {' '.join(str(error).split())}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    atexit.register(os._exit, DONE)


def _run_recorded(config: Config, inputs: Inputs, folder: Path, failures: Path) -> None:
    """Run a rank; leave its failure where the parent looks, before any other rank can miss it.

    A rank never finalizes its interpreter: a process group's threads that still want it abort then (Python < 3.14).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once and silently: the parent says what happened
    _die_with_parent()
    try:
        run_rank(config, inputs, folder)
    except Interrupted as interruption:
        os._exit(interruption.exit_code)
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
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
