"""Whatever a library raises about a file or a text it was given, turned into the one line of a wrong request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_REASON = 300
"""Characters of a library's own words that are shown; some list hundreds of choices."""

PLAIN = (Exception, ValueError, RuntimeError, OSError)
"""Kinds of errors whose words say enough; of any other the kind is told too, as in `KeyError: 'rope'`."""


@contextmanager
def refused(describe: Callable[[str], str], *, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Refuse what a library cannot make sense of, whatever it raises.

    The tokenizers library raises a bare `Exception`, a panic of its Rust derives from `BaseException` alone, configs
    end in assertions and attribute errors. Signals and a lack of memory are nobody's wrong file and pass.

    Args:
        describe: makes the whole line of the library's reason.
        passing: kinds of errors that are lines already.

    Raises:
        ValueError: the block raised something.
    """
    try:
        yield
    except BaseException as error:
        is_refusal = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_refusal or isinstance(error, (MemoryError, *passing)):
            raise
        raise ValueError(describe(reason(error))) from None


def reason(error: BaseException) -> str:
    """Return what an error says, in one line that is not too long."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]}…"
    if type(error) in PLAIN and text:
        return text
    return f"{type(error).__name__}{text and ': '}{text}"
