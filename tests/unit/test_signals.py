"""A signal ends a block at once, or when somebody who has saved what there is looks; exit codes are those of shells."""

from __future__ import annotations

import os
import signal

import pytest

from rotexp.signals import ENDING, SAVING, Interrupted, interruptible


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGUSR2, 143)],
)
def test_a_signal_ends_the_block_at_once(number: signal.Signals, code: int) -> None:
    with pytest.raises(Interrupted, match=f"interrupted by {number.name}") as caught, interruptible():
        send(number)
    assert caught.value.exit_code == code


@pytest.mark.parametrize("number", SAVING)
def test_a_deferred_signal_is_remembered(number: signal.Signals) -> None:
    with interruptible() as stop:
        with stop.deferred():
            assert stop.signal is None
            send(number)
            assert stop.signal is number
        with pytest.raises(Interrupted):
            send(number)


def test_nothing_defers_an_interrupt_from_the_keyboard() -> None:
    with interruptible() as stop, stop.deferred(), pytest.raises(Interrupted, match="SIGINT"):
        send(signal.SIGINT)


def test_it_is_no_ordinary_exception_that_a_phase_would_take_for_a_failure() -> None:
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    with interruptible():
        assert [signal.getsignal(number) for number in ENDING] != before
    assert [signal.getsignal(number) for number in ENDING] == before
