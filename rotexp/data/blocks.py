"""Cut text into token blocks, and order them so that every world size sees the same global batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from rotexp.data.chunks import chunks
from rotexp.data.parts import ids_of
from rotexp.errors.library import quiet_if_refused, refused

TokenBlocks = NDArray[np.int64]
"""Token ids: (blocks, tokens)."""

NO_ID = -1
"""Stands for the id of a token that has none: a tokenizer without a token for the unknown may say so."""

LONGEST_NAME = 60
"""Characters of a token that are shown."""


def cut(text: str, tokenizer: Any, *, length: int, rows: int, key: str, max_blocks: int | None = None) -> TokenBlocks:
    """Tokenize a text as one sequence, without special tokens, and cut it into blocks; what is left over is dropped.

    A text longer than `CHUNK_CHARACTERS` is tokenized chunk by chunk.

    Args:
        tokenizer: a Hugging Face tokenizer.
        length: tokens a block.
        rows: of the model's embedding; every token that is made must have one, also one that is dropped.
        key: the config key that named the text, for the error.
        max_blocks: the first blocks alone, and no more chunks tokenized (and their tokens checked) than these take, so
            of a text in one chunk all of it (None: every block, and so every chunk).

    Raises:
        ValueError: the text is shorter than one block, cannot be tokenized, or has a token without a row, as far as it
            is tokenized.
    """
    token_ids = _tokenize(text, tokenizer, key=key, enough=None if max_blocks is None else max_blocks * length)
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= rows))
    if len(outside):
        token_id = int(token_ids[outside[0]])
        raise ValueError(
            f"{key}: the token {_named(tokenizer, token_id)} has {_shown(token_id)}, and the model's embedding has "
            f"{rows} rows (so {len(outside)} of the text's {len(token_ids)} tokens have none); use the model's own "
            f"tokenizer, take the token out of the text, or resize the embedding to the tokenizer"
        )
    if len(token_ids) < length:
        raise ValueError(
            f"{key}: the text has {len(token_ids)} tokens, fewer than one block of {length}; name a longer text or "
            f"shorten data.sequence_length and evaluation.window"
        )
    return token_ids[: len(token_ids) // length * length].reshape(-1, length)[:max_blocks]


def _tokenize(text: str, tokenizer: Any, *, key: str, enough: int | None) -> NDArray[np.int64]:
    """Return the token ids (tokens,) of a text's chunks, of which no further ones are taken once these are enough.

    A token to which the tokenizer gives no id has `NO_ID`.

    Raises:
        ValueError: the tokenizer fails, or makes no token of a text that is not blank.
    """
    found: list[NDArray[np.int64]] = []
    for chunk in chunks(text):
        found.append(_tokenize_chunk(chunk, tokenizer, key=key))
        if enough is not None and sum(map(len, found)) >= enough:
            break
    token_ids = np.concatenate(found)
    if not len(token_ids) and text.strip():
        raise ValueError(
            f"{key}: the tokenizer makes no token of the text's {len(text)} characters, so its files are empty or of "
            f"another language; use the model's own tokenizer"
        )
    return token_ids


def _tokenize_chunk(chunk: str, tokenizer: Any, *, key: str) -> NDArray[np.int64]:
    """Return the token ids (tokens,) of one chunk; what is written meanwhile is held back for no longer than it."""
    line = f"{key}: the tokenizer cannot read the text"
    with refused(lambda reason: f"{line} ({reason}); use the model's own tokenizer"), quiet_if_refused():
        ids = ids_of(chunk, tokenizer)
        return np.asarray([NO_ID if token_id is None else token_id for token_id in ids], dtype=np.int64)


def _named(tokenizer: Any, token_id: int) -> str:
    if token_id < 0:
        return "of some part of it"
    try:
        return repr(tokenizer.convert_ids_to_tokens(token_id))[:LONGEST_NAME]
    except (LookupError, OverflowError, TypeError, ValueError):
        return "of some part of it"


def _shown(token_id: int) -> str:
    return "no id" if token_id == NO_ID else f"id {token_id}"


def unknown_share(blocks: TokenBlocks, tokenizer: Any) -> float:
    """Return the share of tokens that stand for what the tokenizer does not know; 0 where it has no such token."""
    unknown = tokenizer.unk_token_id
    return 0.0 if unknown is None else float((blocks == unknown).mean())


class BlockDataset(Dataset[Tensor]):
    """Token blocks by index, as tensors (tokens,)."""

    def __init__(self, blocks: TokenBlocks) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.blocks[index])


class BlockSampler(Sampler[int]):
    """The order of blocks over a whole run: each epoch a permutation of its own seed, cut to whole global batches.

    A pure function of its arguments, so a run resumes at any step and every rank agrees. Which blocks a global batch
    has does not depend on the ranks; each of them takes neighbours, however many it takes at once.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        global_batch_size: int,
        steps: int,
        seed: int,
        first_step: int = 0,
        ranks: int = 1,
        micro_batch_size: int = 1,
    ) -> None:
        """Order `steps` global batches.

        Args:
            ranks: that share out what is loaded at once, one part after the other to each.
            micro_batch_size: blocks that a rank takes at once.

        Raises:
            ValueError: there are fewer blocks than one global batch takes.
        """
        if num_blocks < global_batch_size:
            raise ValueError(
                f"data.global_batch_size={global_batch_size}: the calibration text has only {num_blocks} blocks; "
                f"lower it, shorten data.sequence_length or name a longer text"
            )
        self.per_epoch = num_blocks // global_batch_size * global_batch_size
        self.num_blocks = num_blocks
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.first = first_step * global_batch_size
        self.end = steps * global_batch_size
        parts = np.arange(global_batch_size).reshape(ranks, -1, micro_batch_size)
        self.within = parts.swapaxes(0, 1).flatten().tolist()

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        order: list[int] = []
        for position in range(self.first, self.end, self.global_batch_size):
            epoch, place = divmod(position, self.per_epoch)
            if not order or place == 0:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(self.num_blocks, generator=generator).tolist()
            yield from (order[place + offset] for offset in self.within)
