"""Turn the signals that end a run into an exception, so that the run can say how it ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"interrupted by {self.signal.name}")

    @property
    def exit_code(self) -> int:
        """The exit code shells use for an end by this signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted inside the block on SIGINT and SIGTERM."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
