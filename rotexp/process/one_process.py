"""Carry out the job of a command that works in this process alone, and answer with its exit code."""

from __future__ import annotations

from collections.abc import Callable

from rotexp.errors.library import is_out_of_memory
from rotexp.process.exit_codes import DONE, FAILED
from rotexp.process.saying import tell
from rotexp.process.signals import Interrupted, interruptible


def carry_out(job: Callable[[], None], *, name: str, left: Callable[[], str]) -> int:
    """Do a job; say in one line why it was interrupted or failed. A defect keeps its traceback.

    Args:
        name: what the job is called, such as `export`.
        left: tells, afterwards, what it left.

    Raises:
        ValueError: the request was wrong.
    """
    try:
        with interruptible():
            job()
    except Interrupted as interruption:
        _complain(name, interruption, left())
        return interruption.exit_code
    except (ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        _complain(name, error, left())
        return FAILED
    return DONE


def _complain(name: str, error: BaseException, left: str) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    tell(f"the {name} failed: {reason}; {left}")
