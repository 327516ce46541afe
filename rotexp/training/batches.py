"""How the blocks of a step come to this rank: which of them, and how many at once."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from rotexp.config.schema import Config
from rotexp.data.blocks import BlockDataset, BlockSampler, TokenBlocks


def micro_batch_size(config: Config, *, world_size: int) -> int:
    """Return how many blocks a rank takes at once."""
    if config.numerics.exact:
        return config.train.micro_batch_size or 1
    return config.train.micro_batch_size or config.data.global_batch_size // config.sharding.ranks(world_size)


def accumulation_steps(config: Config, *, world_size: int) -> int:
    """Return in how many parts a rank takes its share of a global batch."""
    share = config.data.global_batch_size // config.sharding.ranks(world_size)
    return share // micro_batch_size(config, world_size=world_size)


def tokens_per_step(config: Config, *, world_size: int) -> int:
    """Return the tokens of one step over all ranks that exist, of which there is one where a world is simulated."""
    blocks = config.data.global_batch_size // config.sharding.ranks(world_size) * world_size
    return blocks * config.data.sequence_length


def load_batches(blocks: TokenBlocks, config: Config, accelerator: Accelerator, *, first_step: int) -> Any:
    """Return what yields this rank's token ids (micro batch, tokens) of every step after the first so many."""
    world_size = accelerator.num_processes
    ranks = config.sharding.ranks(world_size)
    micro = micro_batch_size(config, world_size=world_size)
    sampler = BlockSampler(
        len(blocks),
        global_batch_size=config.data.global_batch_size,
        steps=config.train.steps,
        seed=config.seed,
        first_step=first_step,
        ranks=ranks,
        micro_batch_size=micro,
    )
    # Without a generator of its own the loader would draw from torch's stream, once a session and not once a run.
    own = torch.Generator().manual_seed(config.seed)
    loader = DataLoader(BlockDataset(blocks), batch_size=micro * ranks, sampler=sampler, drop_last=True, generator=own)
    if ranks == world_size:
        return accelerator.prepare_data_loader(loader)
    place: dict[str, Any] = {"device": accelerator.device, "put_on_device": True, "split_batches": True}
    return prepare_data_loader(loader, num_processes=ranks, process_index=0, **place)
