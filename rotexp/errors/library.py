"""Whatever a library raises about a file or a text it was given, turned into the one line of a wrong request."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

LONGEST_REASON = 300
"""Characters of a library's own words that are shown; some list hundreds of choices."""

STDERR = 2

PLAIN = (Exception, ValueError, RuntimeError, OSError)
"""Kinds of errors whose words say enough; of any other the kind is told too, as in `KeyError: 'rope'`."""


@contextmanager
def refused(describe: Callable[[str], str], *, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Refuse what a library cannot make sense of, whatever it raises.

    The tokenizers library raises a bare `Exception`, a panic of its Rust derives from `BaseException` alone, configs
    end in assertions and attribute errors. Signals and a lack of memory, torch's `RuntimeError` too, are
    nobody's wrong file and pass. An exit does not: what a part of the user's own calls must not end a command well.

    Args:
        describe: makes the whole line of the library's reason.
        passing: kinds of errors that are lines already.

    Raises:
        ValueError: the block raised something.
    """
    try:
        yield
    except BaseException as error:
        if not is_failure(error) or isinstance(error, passing):
            raise
        if is_out_of_memory(error):
            raise
        raise ValueError(describe(reason(error))) from None


@contextmanager
def quiet_if_refused() -> Iterator[None]:
    """Hold back what is written to standard error, and drop it if the block refuses something: that is one line.

    Rust writes a panic there by itself, often with the whole stack, before it becomes an exception, and transformers
    advises on models that are then refused. Where nothing is refused, all comes out at the end of the block.
    """
    stderr = os.dup(STDERR)
    with TemporaryFile() as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), STDERR)
        is_refused = False
        try:
            yield
        except BaseException as error:
            is_refused = is_failure(error)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, STDERR)
            os.close(stderr)
            held.seek(0)
            if not is_refused:
                os.write(STDERR, held.read())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a failure, or what caused it, was a lack of memory."""
    texts = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    return any(text in f"{type(error).__name__}: {error}" for text in texts)


def is_failure(error: BaseException) -> bool:
    """Return whether an exception says that something did not work, an exit and a panic of Rust too, but no signal."""
    return isinstance(error, (Exception, SystemExit)) or is_panic(error)


def is_panic(error: BaseException) -> bool:
    """Return whether an exception is a panic of Rust, a class which no module offers."""
    return type(error).__name__ == "PanicException"


def reason(error: BaseException) -> str:
    """Return what an error says, in one line that is not too long."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]}…"
    if type(error) in PLAIN and text:
        return text
    return f"{type(error).__name__}{text and ': '}{text}"
