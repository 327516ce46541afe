"""Text is cut into whole blocks, and every world size sees the same global batches in a resumable order."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from rotexp.data import blocks
from rotexp.data.blocks import BlockDataset, BlockSampler, cut, unknown_share

BLOCKS, BATCH = 11, 4


class Letters:
    """A tokenizer whose tokens are letters, but for those that it is told something else of."""

    def __init__(self, **changed: int | None) -> None:
        self.changed = changed
        self.unk_token_id: int | None = None

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> BatchEncoding:
        assert not add_special_tokens
        assert not verbose
        return BatchEncoding({"input_ids": [self.changed.get(letter, ord(letter)) for letter in text]})

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(token_id)


class Failing:
    """A tokenizer that fails in its own way, or makes nothing of a text."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure

    def __call__(self, text: str, **_options: bool) -> dict[str, list[int]]:
        if self.failure is not None:
            raise self.failure
        return {"input_ids": []}


def test_text_is_cut_in_order_and_the_rest_dropped() -> None:
    blocks = cut("abcdefgh", Letters(), length=3, rows=128, key="data.calibration")
    assert blocks.dtype == np.int64
    assert blocks.tolist() == [[ord(letter) for letter in block] for block in ("abc", "def")]


def test_a_text_of_one_block_is_enough() -> None:
    assert cut("abc", Letters(), length=3, rows=128, key="data.calibration").shape == (1, 3)


@pytest.mark.parametrize("text", ["ab", ""])
def test_a_shorter_text_is_refused_naming_key_and_numbers(text: str) -> None:
    message = f"data.evaluation: the text has {len(text)} tokens, fewer than one block of 3; .*data.sequence_length"
    with pytest.raises(ValueError, match=message):
        cut(text, Letters(), length=3, rows=128, key="data.evaluation")


@pytest.mark.parametrize(
    ("text", "changed", "fault"),
    [
        (
            "abcd" * 9 + "~",
            {},
            r"the token '~' has id 126, and the model's embedding has 126 rows \(so 1 of the text's 37",
        ),
        ("~" * 3 + "a", {}, r"the token '~' has id 126, and .* \(so 3 of the text's 4 tokens have none\)"),
        ("abc", {"b": 10**12}, r"the token of some part of it has id 1000000000000, and the model's embedding has 126"),
        ("abc", {"b": -7}, r"the token of some part of it has id -7, and the model's embedding has 126 rows"),
        ("abc", {"b": None}, r"the token of some part of it has no id, and the model's embedding has 126 rows"),
        ("a", {"a": 126}, r"the token '~' has id 126"),
    ],
)
def test_a_token_without_a_row_in_the_embedding_is_refused_wherever_it_stands(
    text: str, changed: dict[str, int | None], fault: str
) -> None:
    """Also one that is dropped behind the last whole block, or stands in a text that is too short."""
    with pytest.raises(
        ValueError, match=rf"^data\.evaluation: {fault}.*; use the model's own tokenizer, take the token"
    ):
        cut(text, Letters(**changed), length=3, rows=126, key="data.evaluation")


def test_the_last_row_is_one() -> None:
    assert cut("ab~", Letters(), length=3, rows=127, key="data.evaluation").tolist() == [[97, 98, 126]]


class PanicException(BaseException):
    """What a panic of the tokenizers library is called in Python."""


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (
            Exception("WordLevel error: Missing [UNK] token\nfrom the vocabulary"),
            "WordLevel error: Missing .UNK. token fr",
        ),
        (PanicException("index out of bounds"), "PanicException: index out of bounds"),
        (TypeError("'>' not supported"), "TypeError: '>' not supported"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_tokenizer_that_fails_is_one_line(failure: BaseException, why: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^data\.calibration: the tokenizer cannot read the text \({why}.*"
    ) as caught:
        cut("abc", Failing(failure), length=3, rows=128, key="data.calibration")
    assert "\n" not in str(caught.value)


def test_what_a_tokenizer_writes_comes_out_after_each_piece(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = []

    class Writing(Letters):
        def __call__(self, text: str, **options: Any) -> Any:
            shown.append(capfd.readouterr().err)
            os.write(2, f"{text}\n".encode())
            return super().__call__(text, **options)

    monkeypatch.setattr(blocks, "chunks", lambda text: iter(text.split("/")))
    cut("ab/cd", Writing(), length=2, rows=128, key="data.calibration")
    assert [*shown, capfd.readouterr().err] == ["", "ab\n", "cd\n"]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), MemoryError()])
def test_a_signal_or_a_lack_of_memory_is_no_fault_of_the_tokenizer(ending: BaseException) -> None:
    with pytest.raises(type(ending)):
        cut("abc", Failing(ending), length=3, rows=128, key="data.calibration")


def test_a_tokenizer_that_makes_nothing_of_a_text_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^data\.calibration: the tokenizer makes no token of the text's 4 characters, "
    ):
        cut("text", Failing(), length=3, rows=128, key="data.calibration")


def test_the_share_of_unknown_tokens_is_counted_where_there_is_such_a_token() -> None:
    tokenizer = Letters()
    blocks = cut("a?b?", tokenizer, length=2, rows=128, key="data.evaluation")
    assert unknown_share(blocks, tokenizer) == 0
    tokenizer.unk_token_id = ord("?")
    assert unknown_share(blocks, tokenizer) == 0.5


def test_blocks_are_served_as_tensors() -> None:
    blocks = np.arange(6, dtype=np.int64).reshape(2, 3)
    dataset = BlockDataset(blocks)
    assert len(dataset) == 2
    assert torch.equal(dataset[1], torch.tensor([3, 4, 5]))


def order(*, steps: int, seed: int = 0, first_step: int = 0) -> list[int]:
    sampler = BlockSampler(BLOCKS, global_batch_size=BATCH, steps=steps, seed=seed, first_step=first_step)
    positions = list(sampler)
    assert len(sampler) == len(positions)
    return positions


def test_an_epoch_is_whole_batches_without_repetition_and_each_is_another_permutation() -> None:
    per_epoch = BLOCKS // BATCH * BATCH
    positions = order(steps=6)
    epochs = [positions[start : start + per_epoch] for start in range(0, len(positions), per_epoch)]
    assert [len(epoch) for epoch in epochs] == [8, 8, 8]
    for epoch in epochs:
        assert len(set(epoch)) == per_epoch
        assert set(epoch) <= set(range(BLOCKS))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_epoch_that_fits_exactly_holds_every_block() -> None:
    sampler = BlockSampler(12, global_batch_size=4, steps=3, seed=0)
    assert sorted(sampler) == list(range(12))


def test_the_order_depends_on_the_seed_alone() -> None:
    first = order(steps=5)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert order(steps=5) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert order(steps=5, seed=1) != first
    assert order(steps=2) == first[: 2 * BATCH]


@pytest.mark.parametrize("first_step", range(7))
def test_resuming_gives_the_same_tail(first_step: int) -> None:
    assert order(steps=6, first_step=first_step) == order(steps=6)[first_step * BATCH :]


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data.global_batch_size=4: the calibration text has only 3 blocks; lower it"):
        BlockSampler(3, global_batch_size=4, steps=1, seed=0)


def rank_batches(*, rank: int, world_size: int, micro: int, steps: int) -> Iterator[Any]:
    """Yield the micro-batches of one rank, loaded as the training loop does."""
    dataset: Any = BlockDataset(np.arange(BLOCKS, dtype=np.int64)[:, None])
    sampler = BlockSampler(BLOCKS, global_batch_size=BATCH, steps=steps, seed=0)
    loader = DataLoader(dataset, batch_size=micro * world_size, sampler=sampler, drop_last=True)
    yield from prepare_data_loader(
        loader, num_processes=world_size, process_index=rank, split_batches=True, even_batches=False, rng_types=[]
    )


@pytest.mark.parametrize(("world_size", "micro"), [(1, 4), (1, 2), (1, 1), (2, 2), (2, 1), (4, 1)])
def test_ranks_and_accumulation_only_split_the_global_batch(world_size: int, micro: int) -> None:
    steps = 5
    whole = order(steps=steps)
    accumulation = BATCH // world_size // micro
    ranks = [list(rank_batches(rank=r, world_size=world_size, micro=micro, steps=steps)) for r in range(world_size)]
    for step in range(steps):
        parts = [batch for rank in ranks for batch in rank[step * accumulation : (step + 1) * accumulation]]
        assert all(part.shape == (micro, 1) for part in parts)
        seen = [int(index) for part in parts for index in part]
        assert sorted(seen) == sorted(whole[step * BATCH : (step + 1) * BATCH])
    assert {len(rank) for rank in ranks} == {steps * accumulation}
