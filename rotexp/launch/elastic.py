"""Ranks as processes of this machine, which may be one of several, by torch elastic's in-process API."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rotexp.config.schema import Config
from rotexp.experiment.inputs import Inputs
from rotexp.files.folders import write_atomically
from rotexp.files.reading import read_json
from rotexp.launch.ending import out_of_time, record_end
from rotexp.launch.rank import run_rank
from rotexp.launch.stopping import RankSignals, listen_as_rank
from rotexp.process.exit_codes import DONE, FAILED, INTERRUPTED, TERMINATED, WRONG_REQUEST, leave_at_once
from rotexp.process.outer import adopt, is_first
from rotexp.process.saying import tell
from rotexp.process.signals import SAVING, Interrupted, StopRequest, end_with_parent, interruptible
from rotexp.runfolder.records import readable_summary

FROM_SLURM = "slurm"
"""The `launch.rdzv_endpoint` that SLURM's variables say."""

WAITS = ("join", "read")
"""What nodes that meet wait for: each other, and the answer of the endpoint."""

LINGER_SECONDS = 1.0
"""How long a failed rank stays, so that one that was killed, and left no record, is seen before peers that miss it."""


class RankError(RuntimeError):
    """The first rank that failed, and why."""


def run_elastic(config: Config, inputs: Inputs, folder: Path, *, nproc: int, stop: StopRequest) -> None:
    """Run the experiment on `nproc` ranks; when one fails or a signal comes, end all of them.

    Args:
        stop: told of the signals.

    Raises:
        RankError: a rank failed.
        Interrupted: a signal ended the run.
    """
    with _settings(config, nproc=nproc) as (settings, failures):
        signals = RankSignals(config, folder, failures, num_ranks=nproc, stop=stop)
        try:
            with signals.passed_on():
                elastic_launch(settings, _run_recorded)(config, inputs, folder, failures)
        except ChildFailedError as error:
            reason = _first_failure(error, failures)
            raise _interruption(error, signals, config, folder, reason) or RankError(reason) from None
        except SignalException as error:
            raise Interrupted(error.sigval) from None


def run_node(config: Config, inputs: Inputs, folder: Path, *, nproc: int, run: Callable[..., int]) -> int:
    """Run this node's ranks of a run on several nodes, which meet at `launch.rdzv_endpoint`; return the exit code.

    The ranks record by themselves how the run ended, in the folder of rank 0, whichever node that is on; those that are
    killed since they are late cannot, so their node does.

    Args:
        folder: where the run is recorded if rank 0 is on this node.
        run: what a rank does with the configuration, the inputs, that folder and its place in the world, in torchrun's
            variables; it returns the rank's exit code.
    """
    inputs.checkpoint.weights.release()

    def record(came: Sequence[int]) -> None:
        """Record it before other nodes' ranks can miss the killed ones, and record a failure."""
        interruption = out_of_time(came, config, folder)
        status = readable_summary(folder).get("status")
        if status == "running":
            record_end(folder, "interrupted", str(interruption))
        elif status is None:  # rank 0 is elsewhere
            tell(interruption)

    with _settings(config, nproc=nproc) as (settings, aside):
        signals = RankSignals(config, folder, aside, num_ranks=nproc, stop=StopRequest(), before_kill=record)
        try:
            with signals.passed_on():
                elastic_launch(settings, _run_as_part)(run, config, inputs, folder, aside)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if signals.came:
                if signals.early:
                    tell(f"{Interrupted(signals.came[0])}; nothing was started")
                return Interrupted(signals.came[0]).exit_code
            if failure.exitcode < 0:  # it could not say so itself
                message = f"rank {rank}: {failure.message}"
                if readable_summary(folder).get("status") == "running":
                    record_end(folder, "failed", message)
                else:
                    tell(message)
            return failure.exitcode if failure.exitcode in (WRONG_REQUEST, INTERRUPTED, TERMINATED) else FAILED
        except RendezvousError as error:
            where = f"launch.rdzv_endpoint={config.launch.rdzv_endpoint}"
            remedy = f"start the command on {config.launch.nnodes} nodes that reach it"
            tell(f"{where}: the nodes did not meet there ({error}); {remedy}")
            return FAILED
        except SignalException as error:
            return Interrupted(error.sigval).exit_code
        except Interrupted as interruption:
            tell(f"{interruption}; nothing was started")
            return interruption.exit_code
    return DONE


def _interruption(
    error: ChildFailedError, signals: RankSignals, config: Config, folder: Path, reason: str
) -> Interrupted | None:
    """Return what ended the ranks if that was a signal: one that came here, or one that they say came to one of them.

    A rank that fails after it, perhaps since it misses one that ended, does not make it a failure.
    """
    code = error.get_first_failure()[1].exitcode
    if not signals.came:
        return Interrupted(signal.SIGTERM) if code in (INTERRUPTED, TERMINATED) else None
    if signals.late or signal.SIGINT in signals.came:
        return out_of_time(signals.came, config, folder)
    orderly = {Interrupted(signal.SIGTERM).exit_code, *(-number for number in signals.came)}
    return Interrupted(signals.came[0], "" if signals.early or code in orderly else f"then {reason}")


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
            signals_to_handle="SIGHUP,SIGQUIT",  # at which elastic gives ranks 30 s; the others are ours
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


def _run_as_part(run: Callable[..., int], config: Config, inputs: Inputs, folder: Path, aside: Path) -> None:
    """Run a rank of several nodes' ranks; as in `_run_recorded`, its interpreter is never finalized."""
    _die_with_parent()
    try:
        with interruptible() as stop:
            listen_as_rank(aside)
            code = run(config, inputs, folder, adopt(), stop=stop)
    except Interrupted as interruption:
        code = interruption.exit_code
    except ValueError as error:
        code = WRONG_REQUEST
        if is_first():
            tell(error)
    if code:
        leave_at_once(code)
    _leave_done()


def _run_recorded(config: Config, inputs: Inputs, folder: Path, failures: Path) -> None:
    """Run a rank; leave its failure where the parent looks, before any other rank can miss it.

    A rank never finalizes its interpreter: a process group's threads that still want it abort then (Python < 3.14).
    """
    _die_with_parent()
    try:
        with interruptible() as stop:
            listen_as_rank(failures)
            run_rank(config, inputs, folder, stop=stop)
    except Interrupted as interruption:
        leave_at_once(interruption.exit_code)  # the parent says what happened
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".removeprefix("PhaseError: ")
        record = {"time": time.time_ns(), "rank": int(os.environ["RANK"]), "reason": reason}
        write_atomically(failures / f"{record['rank']}.json", json.dumps(record))  # whole, although it may be killed
        time.sleep(LINGER_SECONDS)
        leave_at_once(FAILED)
    _leave_done()


def _leave_done() -> None:
    """Let this rank, whose work is done, wait for the others and leave, whatever signals still come."""
    for number in SAVING:
        signal.signal(number, signal.SIG_IGN)
    atexit.register(os._exit, DONE)


def _first_failure(error: ChildFailedError, failures: Path) -> str:
    """Return the rank that failed first, and why: the one that a signal killed, or the one with the earliest record."""
    rank, failure = error.get_first_failure()
    records = [read_json(path) for path in failures.glob("*.json")]
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
