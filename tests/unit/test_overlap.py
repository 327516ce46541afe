"""The same text is known however it is written, and what one text repeats of another is counted at any offset."""

import random
import textwrap
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from rotexp.data import overlap
from rotexp.data.corpora import builtin_corpus
from rotexp.data.overlap import PASSAGE, SHORTEST_UNIT, repetition, spelling_digest

WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"


def prose(*, seed: int, words: int = 2000) -> str:
    """Made-up words in lines and paragraphs; two seeds have no passage in common."""
    numbers = random.Random(seed)
    made = ["".join(numbers.choices("aeiouäßéksntr世", k=numbers.randint(2, 9))) for _ in range(words)]
    return "".join(word + numbers.choice([" ", " ", " ", "\n", "\n\n"]) for word in made)


def letters_of(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())


def counted_share(text: str, source: str, *, passage: int) -> float:
    """The share as its definition says it: every passage looked for in the source."""
    text, source = letters_of(text), letters_of(source)
    covered = [False] * len(text)
    for begin in range(len(text) - passage + 1):
        if text[begin : begin + passage] in source:
            covered[begin : begin + passage] = [True] * passage
    return sum(covered) / max(len(text), 1)


REWRITES: dict[str, Callable[[str], str]] = {
    "mark": lambda text: "\ufeff" + text,
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "trailing blanks": lambda text: text.replace("\n", " \t\n"),
    "ends": lambda text: "  " + text.rstrip() + "\n\n\n",
    "one line": lambda text: " ".join(text.split()),
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "capitals": str.upper,
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "zero-width spaces": lambda text: text.replace(" ", " \u200b"),
    "soft hyphens": lambda text: text.replace("tr", "t\u00adr"),
    "word joiners within words": lambda text: text.replace("tr", "t\u2060r"),
    "variation selectors": lambda text: text.replace(" ", "\ufe0f "),
    "fillers": lambda text: text.replace(" ", "\u3164"),
    "quotation": lambda text: "> " + text.replace("\n", "\n> "),
    "other signs": lambda text: text.replace(" ", ", \u201c").replace("\n", "\u201d\u2026\n"),
}


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES.keys())
def test_another_spelling_is_the_same_text_and_repeats_it_whole(
    rewrite: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prose(seed=0)
    other = rewrite(text)
    assert other != text
    assert spelling_digest(other) == spelling_digest(text)
    assert repetition(other, text) == repetition(text, other) == (1, 1)
    monkeypatch.setattr(overlap, "CHUNK", 300)
    assert spelling_digest(other) == spelling_digest(text)
    assert repetition(other, text) == (1, 1)


def test_marks_of_a_script_are_letters_and_signs_alone_are_told_apart() -> None:
    assert spelling_digest("\u0915\u093f") != spelling_digest("\u0915\u0941")  # one letter with two vowels' signs
    assert spelling_digest("世界") == spelling_digest("世 界。") != spelling_digest("世間")
    assert spelling_digest("\U0001f642 !") == spelling_digest("\U0001f642\n!") != spelling_digest("\U0001f643 !")
    assert repetition("?! " * 200, "?! " * 200) == (0, 0)


WORDS = "".join(prose(seed=0)).split()
SENTENCES = [" ".join(WORDS[place : place + 12]).capitalize() for place in range(0, 1992, 12)]

DISORDERS: dict[str, Callable[[list[str]], str]] = {
    "lines": "\n".join,
    "quoted lines": lambda parts: "".join(f"> {part}\n" for part in parts),
    "listed lines": lambda parts: "".join(f"{number}) {part}\n" for number, part in enumerate(parts)),
    "sentences": ". ".join,
    "questions": "? ".join,
    "wide stops": "。".join,
    "sentences wrapped anew": lambda parts: textwrap.fill(". ".join(parts), width=61),
}


@pytest.mark.parametrize("write", DISORDERS.values(), ids=DISORDERS.keys())
@pytest.mark.parametrize("chunk", [200, 1 << 22])
def test_lines_and_sentences_are_found_in_another_order(
    write: Callable[[list[str]], str], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "CHUNK", chunk)
    mixed = random.Random(7).sample(SENTENCES, len(SENTENCES))
    ordered = [f"{number} {part}" if number % 2 else part for number, part in enumerate(SENTENCES)]
    long = sum(len(letters_of(part)) for part in SENTENCES if len(letters_of(part)) >= SHORTEST_UNIT)
    found = repetition(write(mixed), write(ordered))
    assert found.in_passages == 0
    assert found.share == pytest.approx(long / sum(map(len, map(letters_of, SENTENCES))), abs=0.03)
    assert found.share > 0.9
    assert repetition(write(mixed), write(prose(seed=1).splitlines())).share == 0


def test_a_line_counts_from_its_length_on() -> None:
    line = letters_of(prose(seed=0)).replace(".", "")[:SHORTEST_UNIT]
    other = prose(seed=3)
    whole = SHORTEST_UNIT + len(letters_of(other))
    assert repetition(f"{line}\n{other}", f"x\n{line}\ny").share == pytest.approx(SHORTEST_UNIT / whole, abs=1e-12)
    assert repetition(f"{line[1:]}\n{other}", f"x\n{line[1:]}\ny").share == 0


def test_another_text_has_another_digest_and_repeats_nothing() -> None:
    text, other = prose(seed=0), prose(seed=1)
    assert spelling_digest(text) != spelling_digest(other)
    assert spelling_digest(text) != spelling_digest(text + "x")
    assert repetition(text, other) == (0, 0)


@pytest.mark.parametrize("chunk", [64, 200, 1 << 22])
def test_a_share_is_what_counting_by_hand_gives(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "PASSAGE", 32)
    monkeypatch.setattr(overlap, "CHUNK", chunk)
    ours, theirs = prose(seed=0, words=400), prose(seed=1, words=400)
    text = theirs[:300] + ours[:500] + theirs[700:731] + ours[900:1400] + theirs[1000:1800]
    expected = counted_share(text, theirs, passage=32)
    assert 0.3 < expected < 0.7
    assert repetition(text, theirs).in_passages == pytest.approx(expected, abs=1e-12)


def test_a_passage_counts_from_its_length_on() -> None:
    letters = letters_of(prose(seed=0))
    source = prose(seed=1) + "1" + letters[:PASSAGE] + "1" + prose(seed=2)
    text = letters[:PASSAGE] + "2" + prose(seed=3)
    share = PASSAGE / len(letters_of(text))
    assert repetition(text, source) == pytest.approx((share, share), abs=1e-12)
    assert repetition(letters[1:PASSAGE] + "2" + prose(seed=3), source) == (0, 0)
    assert repetition(letters[: PASSAGE - 1], letters) == repetition("", letters) == repetition(letters, "") == (0, 0)


def test_the_builtin_texts_have_only_common_sentences_in_common() -> None:
    """One sentence in 70: "Return the number of …" and the like."""
    corpus = builtin_corpus()
    found = repetition(corpus.evaluation, corpus.calibration)
    assert found.in_passages == 0
    assert 0 < found.share < 0.02


def test_a_real_text_is_found_in_parts_of_it_at_any_offset() -> None:
    if not WIKITEXT.is_dir():
        pytest.skip("needs the shared WikiText-2")
    test, valid = ((WIKITEXT / name).read_text(encoding="utf-8") for name in ("wiki.test.raw", "wiki.valid.tokens"))
    assert repetition(test, valid) == repetition(valid, test) == pytest.approx((0, 0), abs=1e-4)
    half = len(test) // 2
    found = repetition(test, valid + test[1001:half])
    assert found == pytest.approx(((half - 1001) / len(test),) * 2, abs=2e-3)
    mixed = random.Random(0).sample(valid.splitlines(), valid.count("\n"))
    assert repetition("\n".join(mixed), valid).share > 0.98
