"""A long text is tokenized in chunks that joined are the text, and whose tokens are the whole text's."""

import pydoc_data.topics
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from rotexp.data.blocks import cut
from rotexp.data.chunks import CHUNK_CHARACTERS, chunks
from rotexp.models import tiny

BLOCKS: dict[str, Any] = {"length": 16, "rows": 2048}
"""How the texts are cut: tokens of a block, rows of the embedding."""

TEXTS = ["", "a", "word " * 50, "line\n" * 60, "x" * 400, "a b\n\n\n  c\n" * 40, "\n" * 300, " " * 300, "世界。" * 100]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("longest", [2, 7, 64, 1000])
def test_chunks_are_the_text_and_none_is_too_long_or_empty(text: str, longest: int) -> None:
    found = list(chunks(text, longest=longest))
    assert "".join(found) == text
    assert max(map(len, found)) <= longest
    assert all(found) or text == ""


def test_a_chunk_ends_before_the_space_between_two_words_else_behind_a_line() -> None:
    assert list(chunks("one two three four", longest=11)) == ["one two", " three four"]
    assert list(chunks("one, two.\n\nthree. four.", longest=12)) == ["one, two.\n\n", "three. four."]


def test_what_was_one_sequence_stays_one() -> None:
    text = "word " * (CHUNK_CHARACTERS // 5)
    assert list(chunks(text)) == [text]


GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
LLAMA_3 = pre_tokenizers.Split(Regex("|".join(LLAMA_3_WORDS)), behavior="isolated")


@pytest.mark.parametrize("splitter", [GPT_2, LLAMA_3], ids=["GPT-2", "Llama 3"])
def test_byte_level_tokenizers_split_where_a_chunk_ends(splitter: Any) -> None:
    text = "\n".join(pydoc_data.topics.topics.values())[:100_000]
    whole = [part for part, _place in splitter.pre_tokenize_str(text)]
    cut_first = [part for chunk in chunks(text, longest=1000) for part, _place in splitter.pre_tokenize_str(chunk)]
    assert cut_first == whole


@pytest.mark.parametrize("longest", [1000, 7001])
def test_tokens_of_chunks_are_those_of_the_whole(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.FOLDER)
    text = "\n".join(pydoc_data.topics.topics.values())[:200_000]
    whole = cut(text, tokenizer, **BLOCKS, key="data.calibration")
    monkeypatch.setattr("rotexp.data.blocks.chunks", lambda text: chunks(text, longest=longest))
    assert cut(text, tokenizer, **BLOCKS, key="data.calibration").tolist() == whole.tolist()


def test_the_first_blocks_take_no_more_of_the_text_than_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, taken = AutoTokenizer.from_pretrained(tiny.FOLDER), []
    text = "\n".join(pydoc_data.topics.topics.values())[:50_000]
    whole = cut(text, tokenizer, **BLOCKS, key="data.evaluation")

    def noted(text: str) -> Iterator[str]:
        for chunk in chunks(text, longest=1000):
            taken.append(chunk)
            yield chunk

    monkeypatch.setattr("rotexp.data.blocks.chunks", noted)
    assert cut(text, tokenizer, **BLOCKS, key="data.evaluation", max_blocks=40).tolist() == whole[:40].tolist()
    assert 1 < len(taken) < 5
    assert cut(text, tokenizer, **BLOCKS, key="data.evaluation", max_blocks=10**6).tolist() == whole.tolist()
