"""Ends the ranks of this machine when a signal comes: they may save, and are killed when their time is up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from rotexp.config.schema import Config
from rotexp.launch.ending import LastResort
from rotexp.process.signals import ENDING, Interrupted, StopRequest, watched

SECONDS_AFTER_SIGINT = 5.0
"""How long ranks may take after SIGINT, at which they do not save; a second one ends the wait."""

SECONDS_AFTER_KILL = 30.0
"""How long this process may take to end after its ranks, which elastic waits for even if SIGKILL does not end them."""

WAKE = signal.SIGURG
"""What wakes the thread that waits for ranks; where nobody handles it, nothing happens."""

LISTENS = ".listens"
"""How the file is called, after its process id, by which a rank says that it has begun."""


class RankSignals:
    """Passes the signals that end a run on to the ranks, and kills those that are late, or all before all have begun.

    Attributes:
        came: the signals, in their order.
        late: whether the grace has run out.
        early: whether ranks were killed before all of them had begun, so that there was nothing to save.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        aside: Path,
        *,
        num_ranks: int,
        stop: StopRequest,
        before_kill: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Prepare, without handling anything yet.

        Args:
            folder: the run's.
            aside: where each rank says that it listens.
            num_ranks: on this machine.
            stop: told too, so that nothing takes the same signals again while the end is recorded.
            before_kill: called with the signals when the grace has run out.
        """
        self.came: list[int] = []
        self.late = False
        self.early = False
        self._stop, self._grace, self._before_kill = stop, config.launch.grace_seconds, before_kill
        self._aside, self._num_ranks = aside, num_ranks
        self._last_resort = LastResort(config, folder, more_seconds=SECONDS_AFTER_KILL)
        self._thread = threading.get_ident()
        self._tending = False
        self._began = 0.0
        self._told: set[tuple[int, int]] = set()

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Handle signals inside the block, in which ranks are started; they start with these signals blocked.

        One that dies while it is sent its inputs would leave the sender waiting for ever, since `multiprocessing` keeps
        the pipe's other end open meanwhile. The thread that watches takes the signals for this one, and wakes it.

        Raises:
            Interrupted: a signal came before there was a rank.
        """
        before = {number: signal.signal(number, self._take) for number in ENDING}
        before[WAKE] = signal.signal(WAKE, self._tend)
        resource_tracker.ensure_running()  # whose start unblocks signals
        with watched(self._wake):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _wake(self, came: Sequence[int], seconds: float) -> None:
        signal.pthread_kill(self._thread, WAKE)
        self._last_resort.act(came, seconds)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._began = self._began if self.came else time.monotonic()
        self.came.append(number)
        self._stop.signal = signal.Signals(number)
        if not self._told and not multiprocessing.active_children() and not _starts_a_rank(frame):
            raise Interrupted(number)

    def _tend(self, _number: int, _frame: FrameType | None) -> None:
        """Look after the ranks, of which there may be more than before; elastic gives them too little time to save."""
        if self._tending or not self.came:
            return  # woken while it records, which may take longer than the time between two calls
        self._tending = True
        try:
            self._end_ranks()
        finally:
            self._tending = False

    def _end_ranks(self) -> None:
        self.early |= len(list(self._aside.glob(f"*{LISTENS}"))) < self._num_ranks
        late = time.monotonic() - self._began >= self._seconds()
        if not (self.early or late):
            self._tell()
            return
        if late and not self.late and self._before_kill is not None:
            self._before_kill(self.came)
        self.late |= late
        for rank in multiprocessing.active_children():
            rank.kill()

    def _seconds(self) -> float:
        interrupts = self.came.count(signal.SIGINT)
        if interrupts == 0:
            return self._grace
        return min(self._grace, SECONDS_AFTER_SIGINT) if interrupts == 1 else 0.0

    def _tell(self) -> None:
        for rank in multiprocessing.active_children():
            for number in self.came:
                if rank.pid is not None and (rank.pid, number) not in self._told:
                    self._told.add((rank.pid, number))
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, number)


def listen_as_rank(folder: Path) -> None:
    """Take the signals that end a run, with which this rank started blocked, and say so in a folder of its parent."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    (folder / f"{os.getpid()}{LISTENS}").touch()


def _starts_a_rank(frame: FrameType | None) -> bool:
    """Return whether a frame is inside of the start of a process, which must be whole: it sends the rank its inputs."""
    while frame is not None:
        if frame.f_code is BaseProcess.start.__code__:
            return True
        frame = frame.f_back
    return False
