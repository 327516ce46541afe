"""The same text is known however it is written, and what one text repeats of another is counted at any offset."""

import random
import unicodedata
from pathlib import Path

import pytest

from rotexp.data import overlap
from rotexp.data.corpora import builtin_corpus
from rotexp.data.overlap import PASSAGE, repeated_share, spelling_digest

WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"


def prose(*, seed: int, words: int = 2000) -> str:
    """Made-up words in lines and paragraphs; two seeds have no passage in common."""
    numbers = random.Random(seed)
    made = ["".join(numbers.choices("aeiouäßéksntr世", k=numbers.randint(2, 9))) for _ in range(words)]
    return "".join(word + numbers.choice([" ", " ", " ", "\n", "\n\n"]) for word in made)


def counted_share(text: str, source: str, *, passage: int) -> float:
    """The share as its definition says it: every passage looked for in the source."""
    text, source = ("".join(part.casefold().split()) for part in (text, source))
    covered = [False] * len(text)
    for begin in range(len(text) - passage + 1):
        if text[begin : begin + passage] in source:
            covered[begin : begin + passage] = [True] * passage
    return sum(covered) / max(len(text), 1)


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", " \t\n"),
        lambda text: "  " + text.rstrip() + "\n\n\n",
        lambda text: " ".join(text.split()),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: unicodedata.normalize("NFC", text),
        str.upper,
        lambda text: text.replace(" ", "\u00a0"),
    ],
    ids=["mark", "CRLF", "trailing blanks", "ends", "one line", "NFD", "NFC", "capitals", "no-break spaces"],
)
def test_another_spelling_is_the_same_text_and_repeats_it_whole(rewrite, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prose(seed=0)
    other = rewrite(text)
    assert other != text or text == unicodedata.normalize("NFC", text)
    assert spelling_digest(other) == spelling_digest(text)
    assert repeated_share(other, text) == repeated_share(text, other) == 1
    monkeypatch.setattr(overlap, "CHUNK", 300)
    assert spelling_digest(other) == spelling_digest(text)
    assert repeated_share(other, text) == 1


def test_another_text_has_another_digest_and_repeats_nothing() -> None:
    text, other = prose(seed=0), prose(seed=1)
    assert spelling_digest(text) != spelling_digest(other)
    assert spelling_digest(text) != spelling_digest(text + "x")
    assert repeated_share(text, other) == 0


@pytest.mark.parametrize("chunk", [64, 200, 1 << 22])
def test_a_share_is_what_counting_by_hand_gives(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "PASSAGE", 32)
    monkeypatch.setattr(overlap, "CHUNK", chunk)
    ours, theirs = prose(seed=0, words=400), prose(seed=1, words=400)
    text = theirs[:300] + ours[:500] + theirs[700:731] + ours[900:1400] + theirs[1000:1800]
    expected = counted_share(text, theirs, passage=32)
    assert 0.3 < expected < 0.7
    assert repeated_share(text, theirs) == pytest.approx(expected, abs=1e-12)


def test_a_passage_counts_from_its_length_on() -> None:
    letters = "".join(prose(seed=0).casefold().split())
    source = prose(seed=1) + "1" + letters[:PASSAGE] + "1" + prose(seed=2)
    text = letters[:PASSAGE] + "2" + prose(seed=3)
    whole = len("".join(text.casefold().split()))
    assert repeated_share(text, source) == pytest.approx(PASSAGE / whole, abs=1e-12)
    assert repeated_share(letters[1:PASSAGE] + "2" + prose(seed=3), source) == 0
    assert repeated_share(letters[: PASSAGE - 1], letters) == 0
    assert repeated_share("", letters) == 0
    assert repeated_share(letters, "") == 0


def test_the_builtin_texts_repeat_nothing_of_each_other() -> None:
    corpus = builtin_corpus()
    assert repeated_share(corpus.evaluation, corpus.calibration) == 0


def test_a_real_text_is_found_in_parts_of_it_at_any_offset() -> None:
    if not WIKITEXT.is_dir():
        pytest.skip("needs the shared WikiText-2")
    test, valid = ((WIKITEXT / name).read_text(encoding="utf-8") for name in ("wiki.test.raw", "wiki.valid.tokens"))
    assert repeated_share(test, valid) == repeated_share(valid, test) == 0
    half = len(test) // 2
    assert repeated_share(test, valid + test[1001:half]) == pytest.approx((half - 1001) / len(test), abs=2e-3)
