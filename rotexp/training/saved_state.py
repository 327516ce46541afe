"""Checkpoints of a run: written aside by all ranks, complete or absent, loaded by a world of any size."""

from __future__ import annotations

import math
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from rotexp.files.folders import flush
from rotexp.process.signals import Interrupted, StopRequest
from rotexp.runfolder.checkpoint_folders import (
    aside_of,
    complete,
    fault_of,
    prepare_aside,
    read_facts,
    retain,
    step_folder,
)
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import largest_magnitude, local_rows
from rotexp.sharding.split_vector import SplitVector
from rotexp.sharding.state_dicts import Form, State, agree, check_state
from rotexp.training.checkpoint_index import CheckedReader
from rotexp.training.planners import LoadPlanner, SavePlanner
from rotexp.training.random_states import load_random_states, save_random_states

AHEAD_BYTES = 10_000_000
"""How much is copied from an accelerator ahead of writing it."""


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that is being written aside."""

    path: Path
    step: int
    facts: dict[str, Any]
    written: Future[None]


class Checkpoints:
    """Writes the checkpoints of a run and keeps the newest of them. Every method takes all ranks."""

    def __init__(self, folder: Path, *, keep: int, asynchronous: bool, communication: Communication) -> None:
        """Write into a run's folder.

        Args:
            folder: the run's, on a file system that all ranks share.
            keep: how many complete checkpoints are kept, at least 1.
            asynchronous: whether `save` returns before they are written.
        """
        assert keep >= 1, "the last complete checkpoint is never removed"
        _forgive_single_process()
        self._folder = folder
        self._keep = keep
        self._communication = communication
        self._asynchronous = asynchronous
        self._group = _own_group(communication)
        self._in_flight: _Writing | None = None

    def save(self, step: int, tensors: State, *, facts: Mapping[str, Any]) -> Path | None:
        """Write the checkpoint of a step; one that is there already is replaced.

        What is written is what `tensors`, `facts` and the random states hold now, also where it is written later.

        Args:
            tensors: DTensors, `SplitVector`, and tensors that are the same on every rank, on any device.
            facts: what else is kept, as JSON has it; rank 0's.

        Returns:
            The checkpoint's folder; None where it is still being written, which `wait` ends.

        Raises:
            OSError: it, or one before it that was in flight, could not be written, on all ranks alike; those before
                are as they were, and saving may be tried again.
        """
        self.wait()
        path = step_folder(self._folder, step)
        first = self._communication.rank == 0
        self._require(path, _fault(lambda: prepare_aside(path)) if first else "")
        planners: list[SavePlanner] = []
        self._require(path, _fault(lambda: planners.append(self._hold(aside_of(path), tensors))))
        write = partial(self._write, aside_of(path), dict(tensors), *planners)
        self._in_flight = _Writing(
            path, step, deepcopy(dict(facts)), _start(write) if self._asynchronous else _run(write)
        )
        return None if self._asynchronous else self.wait()

    def wait(self) -> Path | None:
        """Complete the checkpoint that is in flight.

        Returns:
            Its folder; None if there was none.

        Raises:
            OSError: it could not be written, on all ranks alike.
        """
        if self._in_flight is None:
            return None
        writing, self._in_flight = self._in_flight, None
        self._require(writing.path, _fault(writing.written.result))
        self._require(writing.path, _fault(lambda: self._complete(writing)) if self._communication.rank == 0 else "")
        return writing.path

    @contextmanager
    def completed(self, stop: StopRequest) -> Iterator[None]:
        """Complete what is in flight when the block ends, or raises what all ranks raise alike.

        Args:
            stop: takes signals; one that comes meanwhile waits.

        Raises:
            Interrupted: one came, and the checkpoint is complete.
        """
        try:
            yield
        except ArithmeticError:
            self.wait()
            raise
        except Interrupted as interruption:
            if interruption.signal is not signal.SIGINT:  # which is taken at once, by every rank elsewhere
                self.wait()
            raise
        with stop.deferred():
            self.wait()
        if stop.signal is not None:
            raise Interrupted(stop.signal)

    def _hold(self, aside: Path, tensors: State) -> SavePlanner:
        """Write this rank's random states of now, and hold what it will write, copied if that comes later."""
        random_states = aside / f"random-{self._communication.rank}.pt"
        save_random_states(random_states)
        flush(random_states)
        return SavePlanner(tensors, copied=self._asynchronous)

    def _write(self, aside: Path, tensors: dict[str, Any], planner: SavePlanner) -> None:
        """Write what this rank holds, on any thread."""
        # A thread of its own would begin with the first accelerator, hence no copying ahead on a stream there.
        ahead = 0 if self._asynchronous else AHEAD_BYTES
        save_sharded(
            tensors,
            storage_writer=FileSystemWriter(aside, per_thread_copy_ahead=ahead),
            planner=planner,
            process_group=self._group,
            no_dist=self._communication.world_size == 1,
        )

    def _complete(self, writing: _Writing) -> None:
        world_size = self._communication.world_size
        for rank in range(world_size):
            if not (aside_of(writing.path) / f"random-{rank}.pt").is_file():
                raise OSError(f"what rank {rank} wrote is not there; name a folder that all nodes share")
        complete(writing.path, step=writing.step, world_size=world_size, facts=writing.facts)
        retain(writing.path, keep=self._keep)

    def _require(self, path: Path, fault: str) -> None:
        """Raise on all ranks if one has a fault, with nothing of the checkpoint left."""
        fault = agree(fault, communication=self._communication)
        if not fault:
            return
        if self._communication.rank == 0:
            shutil.rmtree(aside_of(path), ignore_errors=True)
        raise OSError(
            f"the checkpoint {path} could not be written ({fault}); make room there, choose another hydra.run.dir, or "
            f"set train.checkpoint_every=null"
        )


def load(path: Path, tensors: State, *, communication: Communication) -> dict[str, Any]:
    """Read a checkpoint into `tensors`, in place; every rank reads only what it holds of them.

    Its index is a pickle, of which nothing but plain values is accepted.

    Returns:
        The facts it was saved with.

    Raises:
        ValueError: it is not complete or not readable, or holds other names, shapes or dtypes, or numbers that are not
            finite; every fault is named, on all ranks alike. Nothing is written unless a file can not be read although
            it is whole, or holds such numbers.
    """
    _forgive_single_process()
    reader, found = CheckedReader(path), dict[str, Form]()

    def read() -> None:
        no_dist = communication.world_size == 1
        load_sharded(dict(tensors), storage_reader=reader, planner=LoadPlanner(), no_dist=no_dist)

    _require_loadable(path, fault_of(path) if communication.rank == 0 else "", communication=communication)
    _require_loadable(path, _fault(lambda: found.update(_forms(reader))), communication=communication)
    check_state(tensors, found, communication=communication, what=f"resume={path}")
    _require_loadable(path, _fault(read), communication=communication)
    _require_loadable(path, _not_finite(tensors), communication=communication)
    facts: dict[str, Any] = read_facts(path)["facts"]
    return facts


def restore_random_states(path: Path, *, communication: Communication) -> bool:
    """Restore this rank's random states, where the world that saved them had the same size and kind of devices.

    Returns:
        Whether they were restored, the same on all ranks where they are alike.
    """
    if read_facts(path)["world_size"] != communication.world_size:
        return False
    return load_random_states(path / f"random-{communication.rank}.pt")


def _require_loadable(path: Path, fault: str, *, communication: Communication) -> None:
    if fault := agree(fault, communication=communication):
        raise ValueError(f"resume={path}: {fault}; name another checkpoint, or resume=never")


def _not_finite(tensors: State) -> str:
    """Return the first tensor of which this rank holds a nan or an infinity; training never saves one."""
    for name, value in tensors.items():
        for part in value.tensors if isinstance(value, SplitVector) else (local_rows(value),):
            if part.is_floating_point() and not math.isfinite(largest := largest_magnitude(part)):
                return f"{name} holds {largest}"
    return ""


def _forms(reader: FileSystemReader) -> dict[str, Form]:
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    return {name: Form(tuple(entry.size), entry.properties.dtype) for name, entry in tensors.items()}


def _own_group(communication: Communication) -> dist.ProcessGroup | None:
    """Return a group on gloo for checkpoints alone: another thread uses it, and objects need not go over devices."""
    return dist.new_group(backend="gloo") if communication.world_size > 1 else None


def _start(write: Callable[[], None]) -> Future[None]:
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    written = executor.submit(write)
    executor.shutdown(wait=False)
    return written


def _run(write: Callable[[], None]) -> Future[None]:
    written: Future[None] = Future()
    try:
        write()
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        written.set_exception(error)
    else:
        written.set_result(None)
    return written


def _fault(action: Callable[[], object]) -> str:
    """Do something; return in one line why it failed, empty if it did not."""
    try:
        action()
    except CheckpointException as failure:  # of several ranks, and no Exception; it swallows interrupts too
        rank = min(failure.failures)
        error = failure.failures[rank][0]
        if not isinstance(error, Exception):
            raise error from None
        return f"rank {rank}: {_line(error)}"
    except Exception as error:
        return _line(error)
    return ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _forgive_single_process() -> None:
    """Ignore that a world of one saves and loads without a process group; it is meant."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
