"""Turn the signals that end a run into an exception, at once or when the run has saved what it has."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAVING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What ends a run in order: schedulers announce a pre-emption by SIGTERM or, as asked to, by one of the others."""

ENDING = (signal.SIGINT, *SAVING)

PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"interrupted by {self.signal.name}")

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, as shells have it, and 143, SIGTERM's, for the others."""
        return 128 + (self.signal if self.signal is signal.SIGINT else signal.SIGTERM)


class StopRequest:
    """Raises Interrupted when a signal comes; while `deferred`, remembers it instead, but for SIGINT."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._deferred = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal, as a handler does.

        Raises:
            Interrupted: it cannot wait.
        """
        if not self._deferred or number == signal.SIGINT:
            raise Interrupted(number)
        self.signal = signal.Signals(number)

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
