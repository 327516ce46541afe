"""A text is tokenized in parts only where these have the tokens of the whole, whatever the text."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from rotexp.data import parts as module
from rotexp.data.corpora import builtin_corpus
from rotexp.data.parts import ids_of, parts, splits_at_borders
from rotexp.models import tiny

FOLDER = Path(tiny.__file__).with_name("weights")
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
AFTER_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2])
PIECES = (*" \n\t7_!é٣\u00a0", "  ", "word", "I'm", "don't", "1234", "...", "e\u0301", "世界")


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def whole(text: str, tokenizer: Any) -> list[int]:
    """The oracle: the text as one sequence."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


@pytest.mark.parametrize("splitter", [GPT_2, AFTER_DIGITS], ids=["GPT-2", "after digits"])
def test_tokens_of_parts_are_those_of_the_whole(splitter: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = splitter
    monkeypatch.setattr(module, "PART_CHARACTERS", 8)
    draw = random.Random(0)
    for text in ["", " ", "a b", *("".join(draw.choices(PIECES, k=300)) for _ in range(50))]:
        assert ids_of(text, tokenizer) == whole(text, tokenizer)


def test_at_its_length_too(tokenizer: Any) -> None:
    text = builtin_corpus().evaluation
    assert len(list(parts(text))) > 30
    assert ids_of(text, tokenizer) == whole(text, tokenizer)


@pytest.mark.parametrize("longest", [1, 7, 50])
def test_parts_are_the_text_and_begin_with_a_space_between_letters(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_CHARACTERS", longest)
    text = "one two,  three_ _four 5 6\n seven eight"
    found = list(parts(text))
    assert "".join(found) == text
    assert all(part[0] == " " and part[1].isalnum() for part in found[1:])
    assert all(len(part) >= longest for part in found[:-1])


OTHERS = {
    "space before the first word": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "own pattern": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior="merged_with_previous"), pre_tokenizers.ByteLevel(use_regex=False)]
    ),
    "SentencePiece": pre_tokenizers.Metaspace(),
    "none": None,
}


@pytest.mark.parametrize("splitter", OTHERS.values(), ids=OTHERS)
def test_a_tokenizer_that_splits_elsewhere_is_given_the_whole(splitter: Any, tokenizer: Any) -> None:
    assert splits_at_borders(tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = splitter
    assert not splits_at_borders(tokenizer)


def test_so_is_one_that_normalizes(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("x")
    assert not splits_at_borders(tokenizer)


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("of the", normalized=False),
        AddedToken("end", rstrip=True, normalized=False),
        AddedToken("end", lstrip=True, normalized=False),
        AddedToken("end", single_word=True, normalized=False),
    ],
    ids=["with a blank", "rstrip", "lstrip", "single word"],
)
def test_so_is_one_with_a_token_that_reaches_over_a_space(added: AddedToken, tokenizer: Any) -> None:
    tokenizer.add_tokens([added])
    assert not splits_at_borders(tokenizer)
    assert ids_of("the end of the end", tokenizer) == whole("the end of the end", tokenizer)
