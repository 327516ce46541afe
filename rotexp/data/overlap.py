"""How much of one text stands in another: signs, blanks, letter case, line ends and Unicode's forms do not matter."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rotexp.data.chunks import chunks

PASSAGE = 256
"""Shortest run of letters that counts as repeated wherever it begins: about 50 words of English. A power of two."""

SHORTEST_UNIT = 40
"""Letters of the shortest line or sentence that counts as repeated: shorter ones are common to unrelated texts."""

CHUNK = 1 << 22
"""Characters compared at a time."""

LINE_END, SENTENCE_END = "\n", "."
SENTENCE_ENDS = frozenset(".!?\u3002\u0964\u06d4\u061f")
"""Also of Chinese and Japanese, of Hindi, and of Urdu and Arabic; the form NFKC makes ASCII of the wide ones."""

INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"
    + "".join(map(chr, [*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))
)
"""Letters and marks by their category that show nothing: fillers and variation selectors."""

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Where each begins, and the place behind its end."""

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FILTER_BITS = np.uint64(24)


class _Kept(dict[int, str | None]):
    """What `str.translate` makes of a character: letters, marks and numbers stay, and ends of lines and sentences."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        self[code] = None
        if character in SENTENCE_ENDS:
            self[code] = SENTENCE_END
        elif character == LINE_END or (unicodedata.category(character)[0] in "LMN" and character not in INVISIBLE):
            self[code] = character
        return self[code]


KEPT = _Kept()
WITHOUT_ENDS = str.maketrans("", "", LINE_END + SENTENCE_END)


def spelling_digest(text: str) -> str:
    """The SHA-256 of a text's letters and numbers, the same however its lines, blanks, signs and letters are written.

    A text without any, such as one of signs, has that of its characters without blanks.
    """
    digest, is_empty = hashlib.sha256(), True
    for part in _folded(text):
        letters = part.translate(KEPT).translate(WITHOUT_ENDS)
        digest.update(letters.encode("utf-8"))
        is_empty = is_empty and not letters
    if is_empty:
        for part in _folded(text):
            digest.update("".join(part.split()).encode("utf-8"))
    return digest.hexdigest()


class Repetition(NamedTuple):
    """Shares from 0 to 1 of a text's letters and numbers that stand in another too.

    Attributes:
        share: in passages, or in whole lines and sentences.
        in_passages: in passages alone, which texts have in common only where one was taken from the other.
    """

    share: float
    in_passages: float


def repetition(text: str, source: str) -> Repetition:
    """How much of a text stands in the source too.

    Counted are passages of `PASSAGE` letters or more, compared at every offset of either text by polynomial hashes of
    64 bits, and whole lines and sentences of `SHORTEST_UNIT` or more, in any order and without numbers before them.
    Not seen is what was reworded, translated or written with look-alike letters, and shorter parts in another order.
    A text without letters and numbers repeats nothing.
    """
    marked = "".join(part.translate(KEPT) for part in _folded(text))
    letters = _letters_of(marked)
    passages, lines, sentences = _Passages(letters), _Units(marked, LINE_END), _Units(marked, SENTENCE_END)
    for part in _folded(source):
        kept = part.translate(KEPT)
        passages.look_in(kept)
        lines.look_in(kept)
        sentences.look_in(kept)
    found = [passages.found(), lines.found(), sentences.found()]
    return Repetition(_covered_share(found, len(letters)), _covered_share(found[:1], len(letters)))


def _covered_share(found: Sequence[Spans], length: int) -> float:
    """The share of letters that lie in any of the spans."""
    changes = np.zeros(length + 1, dtype=np.int64)
    for begins, ends in found:
        np.add.at(changes, begins, 1)
        np.add.at(changes, ends, -1)
    return float(np.count_nonzero(np.cumsum(changes[:-1])) / max(length, 1))


def _folded(text: str) -> Iterator[str]:
    """Yield a text part by part, case-folded and in Unicode's form NFKC."""
    for part in chunks(text, longest=CHUNK):
        yield unicodedata.normalize("NFKC", part).casefold()


class _Units:
    """The lines of a text, or its sentences, and which of them a source has."""

    def __init__(self, marked: str, end: str) -> None:
        """Take a text's letters with the ends of its lines and sentences, and the end that is meant."""
        self._end = end
        self._places: dict[str, list[tuple[int, int]]] = {}
        self._found: set[str] = set()
        self._rest = ""
        place = 0
        for unit in map(_letters_of, marked.split(end)):
            if len(_named(unit)) >= SHORTEST_UNIT:
                self._places.setdefault(_named(unit), []).append((place, place + len(unit)))
            place += len(unit)

    def look_in(self, part: str) -> None:
        """Look for them in the next part of the source."""
        *units, self._rest = (self._rest + part).split(self._end)
        self._look_for(units)

    def found(self) -> Spans:
        """Return where those that the source had begin and end, in letters of the text."""
        self._look_for([self._rest])
        places = [place for unit in self._found for place in self._places[unit]]
        begins, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        return begins, ends

    def _look_for(self, units: list[str]) -> None:
        self._found.update(self._places.keys() & map(_named, map(_letters_of, units)))


def _letters_of(unit: str) -> str:
    return unit.translate(WITHOUT_ENDS)


def _named(unit: str) -> str:
    """A line or sentence without the number before it."""
    return unit.lstrip("0123456789")


class _Passages:
    """The passages of a text at every offset, and which of them a source has."""

    def __init__(self, letters: str) -> None:
        self._hashes, self._inverse = np.unique(_passage_hashes(letters), return_inverse=True)
        self._occurs = np.zeros(len(self._hashes), dtype=bool)
        self._possible = np.zeros(1 << int(FILTER_BITS), dtype=bool)  # most of the source are told apart by this alone
        self._possible[_filter_places(self._hashes)] = True
        self._rest = ""

    def look_in(self, part: str) -> None:
        """Look for them in the next part of the source."""
        letters = self._rest + _letters_of(part)
        self._rest = letters[-(PASSAGE - 1) :]
        hashes = _passage_hashes(letters)
        likely = hashes[self._possible[_filter_places(hashes)]]
        if len(likely):
            places = np.searchsorted(self._hashes, likely).clip(max=len(self._hashes) - 1)
            self._occurs[places[self._hashes[places] == likely]] = True

    def found(self) -> Spans:
        """Return where those that the source had begin and end, in letters of the text."""
        begins = np.flatnonzero(self._occurs[self._inverse])
        return begins, begins + PASSAGE


def _passage_hashes(letters: str) -> NDArray[np.uint64]:
    """The hash of the passage that begins at each letter: a polynomial in its code points modulo 2**64."""
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
