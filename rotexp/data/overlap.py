"""How much of one text stands in another: blanks, letter case, line ends and Unicode's forms make no difference."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rotexp.data.pieces import pieces

PASSAGE = 256
"""Shortest run of characters, blanks left out, that counts as repeated: about 50 words of English. A power of two."""

CHUNK = 1 << 22
"""Characters compared at a time."""

BYTE_ORDER_MARK = "\ufeff"
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FILTER_BITS = np.uint64(24)


def spelling_digest(text: str) -> str:
    """The SHA-256 of a text's letters and signs, the same however its lines, blanks and letters are written."""
    digest = hashlib.sha256()
    for part in _letters(text):
        digest.update(part.encode("utf-8"))
    return digest.hexdigest()


def repeated_share(text: str, source: str) -> float:
    """The share of a text's characters that stand in passages of `PASSAGE` or more which the source holds too.

    Passages are compared at every offset of either text, by polynomial hashes of 64 bits.

    Returns:
        A number from 0 to 1; 0 for a text shorter than a passage.
    """
    found, inverse = np.unique(_passage_hashes("".join(_letters(text))), return_inverse=True)
    if not len(found):
        return 0.0
    occurs = np.zeros(len(found), dtype=bool)
    possible = np.zeros(1 << int(FILTER_BITS), dtype=bool)  # most passages of the source are told apart by this alone
    possible[_filter_places(found)] = True
    for hashes in _source_hashes(source):
        likely = hashes[possible[_filter_places(hashes)]]
        places = np.searchsorted(found, likely).clip(max=len(found) - 1)
        occurs[places[found[places] == likely]] = True
    return _covered_share(occurs[inverse])


def _letters(text: str) -> Iterator[str]:
    """Yield a text part by part, case-folded and in Unicode's form NFKC, without blanks and byte-order marks."""
    for part in pieces(text, longest=CHUNK):
        folded = unicodedata.normalize("NFKC", part.replace(BYTE_ORDER_MARK, "")).casefold()
        yield "".join(folded.split())


def _source_hashes(source: str) -> Iterator[NDArray[np.uint64]]:
    """Yield the hashes of every passage of the source, part by part."""
    rest = ""
    for part in _letters(source):
        letters = rest + part
        yield _passage_hashes(letters)
        rest = letters[-(PASSAGE - 1) :]


def _passage_hashes(letters: str) -> NDArray[np.uint64]:
    """The hash of the passage that begins at each character: a polynomial in its code points modulo 2**64."""
    hashes = np.frombuffer(letters.encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    if len(hashes) < PASSAGE:
        return hashes[:0]
    multiplier, length = np.array([MULTIPLIER]), 1  # arrays wrap around in silence, numbers warn
    while length < PASSAGE:
        hashes = hashes[:-length] * multiplier + hashes[length:]
        multiplier, length = multiplier * multiplier, 2 * length
    return hashes


def _filter_places(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The leading bits of hashes, which are the best mixed ones."""
    return hashes >> (np.uint64(64) - FILTER_BITS)


def _covered_share(begins: NDArray[np.bool_]) -> float:
    """The share of characters in a passage, from whether one begins at each of them but the last `PASSAGE - 1`."""
    changes = np.zeros(len(begins) + PASSAGE, dtype=np.int64)
    changes[: len(begins)] += begins
    changes[PASSAGE:] -= begins
    return float(np.mean(np.cumsum(changes[:-1]) > 0))
