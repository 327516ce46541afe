"""Turn the signals that end a run into an exception, at once or when the run has saved what it has."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from types import FrameType

from rotexp.process.exit_codes import INTERRUPTED, TERMINATED

SAVING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What ends a run in order: schedulers announce a pre-emption by SIGTERM or, as asked to, by one of the others."""

ENDING = (signal.SIGINT, *SAVING)

WATCH_SECONDS = 0.1
"""How often somebody looks whether what a signal asked for has happened."""

PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, number: int, note: str = "") -> None:
        """Say which signal it was, and what else people should know of that end."""
        self.signal = signal.Signals(number)
        super().__init__(f"interrupted by {self.signal.name}{note and '; '}{note}")

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, as shells have it, and 143, SIGTERM's, for the others."""
        return INTERRUPTED if self.signal is signal.SIGINT else TERMINATED


class StopRequest:
    """Raises Interrupted when the first signal comes; while `deferred`, remembers it instead, but for SIGINT."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._deferred = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal, as a handler does; one that a run was already told by is no news, except SIGINT.

        Raises:
            Interrupted: it cannot wait.
        """
        if self.signal is not None and number != signal.SIGINT:
            return  # launchers send it to a process and to its group; the first is being obeyed
        self.signal = signal.Signals(number)
        if not self._deferred or number == signal.SIGINT:
            raise Interrupted(number)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block somebody looks at `signal` from time to time, and ends the run in order."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False


def end_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when its parent dies, even by SIGKILL; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def interruptible(stop: StopRequest | None = None) -> Iterator[StopRequest]:
    """Handle the signals that end a run inside the block."""
    stop = StopRequest() if stop is None else stop
    before = {number: signal.signal(number, stop.handle) for number in ENDING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watched(act: Callable[[Sequence[int], float], None]) -> Iterator[None]:
    """From the first signal that ends a run to the end of the block, call `act` again and again on another thread.

    It hears of a signal at once, where handlers wait until the main thread leaves compiled code: a long step, or a
    collective that a peer never joins.

    Args:
        act: takes the signals that came, in their order, and the seconds since the first.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    Thread(target=_watch, args=(reader, act), daemon=True, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def _watch(reader: int, act: Callable[[Sequence[int], float], None]) -> None:
    came: list[int] = []
    began = 0.0
    with open(reader, "rb", buffering=0) as numbers:
        while True:
            if select.select([numbers], [], [], WATCH_SECONDS if came else None)[0]:
                new = numbers.read(64)
                if not new:  # the block has ended
                    return
                began = began if came else time.monotonic()
                came += [number for number in new if number in ENDING]
            if came:
                act(came, time.monotonic() - began)
