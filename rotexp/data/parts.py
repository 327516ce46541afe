"""Tokenize a text in parts, on all threads, where a tokenizer makes of them the tokens of the whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

PART_CHARACTERS = 1 << 12
"""Shortest part but for the last; a fast tokenizer takes half as long for such parts as for the whole of megabytes."""

BORDER = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
"""The space between two letters or digits, with which a part begins."""


def ids_of(text: str, tokenizer: Any) -> list[int | None]:
    """Return the ids of a text's tokens, none of them special, as if it had been tokenized as one sequence."""
    options = {"add_special_tokens": False, "verbose": False}
    if not splits_at_borders(tokenizer):
        return list(tokenizer(text, **options)["input_ids"])
    found = tokenizer(list(parts(text)), return_attention_mask=False, **options)["input_ids"]
    return list(chain.from_iterable(found))


def parts(text: str) -> Iterator[str]:
    """Yield a text in parts, which joined are the text and each but the first of which begins at a border."""
    start = 0
    while border := BORDER.search(text, start + PART_CHARACTERS):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def splits_at_borders(tokenizer: Any) -> bool:
    """Return whether no token of any text reaches over a border, and none depends on what is beyond it.

    So it is where nothing but GPT-2's pattern splits the text, before which digits may be set apart: no token of it has
    a space behind anything else, and none is put before the first word. Tokens that were added are looked for in the
    text itself: they must have no blank in them and take none beside them.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is not None:
        return False
    splitter = backend.pre_tokenizer
    several = isinstance(splitter, Sequence)
    *before, last = splitter if several else (splitter,)
    plain = isinstance(last, ByteLevel) and last.use_regex and not last.add_prefix_space
    added = backend.get_added_tokens_decoder().values()
    return (
        plain
        and all(isinstance(step, Digits) for step in before)
        and not any(token.lstrip or token.rstrip or token.single_word or " " in token.content for token in added)
    )
