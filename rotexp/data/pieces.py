"""Cut a long text into pieces that are tokenized one after the other, so that memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterator

PIECE_CHARACTERS = 1 << 24
"""Longest text tokenized as one sequence; a fast tokenizer takes about 160 bytes a character while it does so."""


def pieces(text: str, *, longest: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield a text in pieces of at most `longest` characters, which joined are the text.

    A piece ends behind the end of a line, or else before a space, since hardly any tokenizer has a token across those.
    A tokenizer that puts a space before the text's first word puts one before that of each piece too.
    """
    start = 0
    while len(text) - start > longest:
        end = _last_border(text, start + longest // 2, start + longest)
        yield text[start:end]
        start = end
    yield text[start:]


def _last_border(text: str, low: int, high: int) -> int:
    """Return the last place in (low, high] to end a piece at: a line's end, else a space, else `high`."""
    border = text.rfind("\n", low, high) + 1
    while border and text[border].isspace():  # blank lines stay together
        border = text.rfind("\n", low, border - 1) + 1
    if not border:
        border = text.rfind(" ", low + 1, high)
    return border if border > low else high
