"""Cut a long text into chunks that are tokenized one after the other, so that memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_CHARACTERS = 1 << 24
"""Longest text tokenized as one sequence; a fast tokenizer takes about 160 bytes a character while it does so."""


def chunks(text: str, *, longest: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Yield a text in chunks of at most `longest` characters, which joined are the text.

    A chunk ends between a word and the space before the next, or if there is no such place behind a line. Byte-level
    tokenizers split between word and space in any case, so that the chunks' tokens are those of the whole text. A
    tokenizer that puts a space before a text's first word puts one before that of each chunk.
    """
    start = 0
    while len(text) - start > longest:
        end = _last_border(text, start + 1, start + longest)
        yield text[start:end]
        start = end
    yield text[start:]


def _last_border(text: str, low: int, high: int) -> int:
    """Return the last place from `low` to `high` to end a chunk at; `high` where there is none."""
    space = text.rfind(" ", low, high)
    while space > 0 and not (text[space - 1].isalnum() and text[space + 1].isalnum()):
        space = text.rfind(" ", low, space)
    return space if space > 0 else text.rfind("\n", low, high) + 1 or high
