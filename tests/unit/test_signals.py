"""A signal ends a block at once, or when somebody who has saved what there is looks; exit codes are those of shells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rotexp.process.signals import ENDING, SAVING, Interrupted, interruptible, watched


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
    with interruptible() as stop, stop.deferred():
        assert stop.signal is None
        send(number)
        assert stop.signal is number


@pytest.mark.parametrize("number", SAVING)
def test_a_signal_that_is_being_obeyed_already_does_not_interrupt_that(number: signal.Signals) -> None:
    """A launcher sends it to the process and to its group, and a run that saves and ends must not be torn apart."""
    with interruptible() as stop:
        with stop.deferred():
            send(number)
        send(number)
        send(signal.SIGTERM)
        assert stop.signal is number
        with pytest.raises(Interrupted, match="SIGINT"):
            send(signal.SIGINT)


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


def test_somebody_else_watches_until_the_end_of_the_block() -> None:
    seen: list[tuple[list[int], float]] = []
    twice = threading.Event()

    def act(came: Sequence[int], seconds: float) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.append((list(came), seconds))
        if len(seen) > 1:
            twice.set()

    with interruptible() as stop, stop.deferred(), watched(act):
        assert not seen
        send(signal.SIGUSR1)
        assert twice.wait(timeout=30)
    assert seen[0][0] == [signal.SIGUSR1]
    assert 0 <= seen[0][1] < seen[1][1]
    assert signal.set_wakeup_fd(-1) == -1, "as it was before"


STUCK = """
import hashlib, json, os, signal, sys
from pathlib import Path
from rotexp.config.schema import Config
from rotexp.launch.options import LaunchConfig
from rotexp.launch.ending import LastResort
from rotexp.process.signals import interruptible, watched

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
last_resort = LastResort(Config(launch=LaunchConfig(grace_seconds=0.5)), folder)
with interruptible() as stop, watched(last_resort.act), stop.deferred():
    os.kill(os.getpid(), signal.SIGTERM)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # compiled code that no handler interrupts
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_step_longer_than_the_grace_ends_and_is_recorded(begun: bool, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    summary.write_text('{"status": "running", "error": null}')
    given = [str(tmp_path)] if begun else []
    stuck = subprocess.run(
        [sys.executable, "-c", STUCK, *given], check=False, capture_output=True, text=True, timeout=60
    )
    assert stuck.returncode == 143
    ended = "interrupted by SIGTERM; launch.grace_seconds=0.5 ran out; no checkpoint was saved"
    assert (stuck.stdout, stuck.stderr.count("\n"), ended in stuck.stderr) == ("", 1, True), stuck.stderr
    recorded = {"status": "interrupted", "error": ended} if begun else {"status": "running", "error": None}
    assert json.loads(summary.read_text()) == recorded
