"""Cut text into token blocks, and order them so that every world size sees the same global batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

TokenBlocks = NDArray[np.int64]
"""Token ids: (blocks, tokens)."""


def cut(text: str, tokenizer: Any, *, length: int, key: str) -> TokenBlocks:
    """Tokenize a text as one sequence, without special tokens, and cut it into blocks; what is left over is dropped.

    Args:
        tokenizer: a Hugging Face tokenizer.
        length: tokens a block.
        key: the config key that named the text, for the error.

    Raises:
        ValueError: the text is shorter than one block.
    """
    token_ids = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    if len(token_ids) < length:
        raise ValueError(
            f"{key}: the text has {len(token_ids)} tokens, fewer than one block of {length}; name a longer text or "
            f"shorten data.sequence_length and evaluation.window"
        )
    return token_ids[: len(token_ids) // length * length].reshape(-1, length)


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

    A pure function of its arguments, so a run resumes at any step and every rank agrees.
    """

    def __init__(self, num_blocks: int, *, global_batch_size: int, steps: int, seed: int, first_step: int = 0) -> None:
        """Order `steps` global batches.

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
        self.seed = seed
        self.first = first_step * global_batch_size
        self.end = steps * global_batch_size

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        order: list[int] = []
        for position in range(self.first, self.end):
            epoch, place = divmod(position, self.per_epoch)
            if not order or place == 0:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(self.num_blocks, generator=generator).tolist()
            yield order[place]
