"""A job of one process ends by a code and at most one line; a defect keeps its traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

from rotexp.process.one_process import carry_out


def raising(error: BaseException) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def carried_out(job: Callable[[], None]) -> int:
    return carry_out(job, name="job", left=lambda: "nothing is left")


def test_what_is_done_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[bool] = []
    assert carried_out(lambda: done.append(True)) == 0
    assert done == [True]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ArithmeticError("the logits\nchanged"), "the logits changed"),
        (OSError("no space left"), "no space left"),
        (MemoryError(), "MemoryError"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
    ],
)
def test_what_failed_says_why_and_what_is_left(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert carried_out(raising(error)) == 1
    assert capsys.readouterr() == ("", f"rotexp: the job failed: {said}; nothing is left\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_signal_interrupts_and_handlers_are_as_before(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    assert carried_out(lambda: os.kill(os.getpid(), number)) == code
    assert capsys.readouterr().err == f"rotexp: the job failed: interrupted by {number.name}; nothing is left\n"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("error", [RuntimeError("a defect"), ValueError("run=x: is wrong"), KeyError("name")])
def test_a_wrong_request_and_a_defect_go_on_to_the_caller(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)) as caught:
        carried_out(raising(error))
    assert caught.value is error
    assert capsys.readouterr() == ("", "")
