"""Check that a sharding strategy of one's own says of worlds, meshes and bytes what then is so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rotexp.config.components import Component
from rotexp.config.schema import Config
from rotexp.config.validation import validate_world
from rotexp.metrics.static_memory import predict
from rotexp.models.load import open_checkpoint
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.optim.options import CayleySGDConfig
from rotexp.rotation.building import build_for_run
from rotexp.sharding.applying import EffectiveSharding, shard
from rotexp.sharding.options import SPECIFIC, ShardingConfig
from rotexp.sharding.strategies import Strategy, check_strategy_options, mesh_sizes, strategy_of
from rotexp.testing.rules import rule
from rotexp.training.options import Trainable, TrainConfig

FLAGS = ("keeps_weights_whole", "reshards_after_forward", "splits_master")
FACTORS = (1, 2, 4)
"""The worlds tried, in the smallest one's size."""
NUM_UNITS = 6


def check_strategy(cls: type[Strategy], **options: Any) -> None:
    """Check what a strategy says, and shard a small model without memory as first and last rank of several worlds.

    Args:
        cls: a class that its module holds under its own name; called as `cls(**options)`.

    Raises:
        AssertionError: an attribute is missing or no such thing, its smallest world is refused or does nothing, the
            sizes of a mesh do not make up the world, an answer is not the same twice or on every rank, or a rank holds
            other bytes than are stated before a run.
    """
    sharding = ShardingConfig(_target_=f"{cls.__module__}.{cls.__qualname__}", options=options)
    with rule(f"{cls.__name__}({options or ''})"):
        strategy = strategy_of(sharding)
        _check_attributes(strategy)
        check_strategy_options(sharding)
    _check_answers(strategy)
    config = Config(
        model=ModelConfig("random_llama", ModelSource.random, size="nano"),
        optimizer=CayleySGDConfig(),
        objective=Component("ce", "rotexp.training.objectives.CrossEntropy"),
        train=TrainConfig(params=Trainable.all),
        sharding=sharding,
    )
    _check_smallest_world(config, strategy.minimum_world)
    for factor in FACTORS:
        _check_world(config, world_size=factor * strategy.minimum_world)


def _check_attributes(strategy: Strategy) -> None:
    smallest = getattr(strategy, "minimum_world", None)
    assert isinstance(smallest, int), f"minimum_world={smallest!r}: must be a whole number"
    assert smallest >= 1, f"minimum_world={smallest!r}: must be 1 or more"
    for flag in FLAGS:
        value = getattr(strategy, flag, None)
        assert isinstance(value, bool), f"{flag}={value!r}: must be True or False"
    unknown = {*strategy.takes} - SPECIFIC.keys()
    assert not unknown, f"takes={unknown}: must be of {', '.join(SPECIFIC)}"
    split = strategy.splits_master and not strategy.keeps_weights_whole
    assert not split, "splits_master=True: the master is of weights that are whole; set keeps_weights_whole=True"


def _check_answers(strategy: Strategy) -> None:
    """Ask twice, as each rank and each phase does."""
    places = [None, *range(NUM_UNITS)]
    for place_ in places:
        first, second = (strategy.shards_unit(place_, num_units=NUM_UNITS) for _ in range(2))
        assert isinstance(first, bool), f"shards_unit({place_})={first!r}: must be True or False"
        assert first is second, f"shards_unit({place_}): is {first} and then {second}; ranks would differ"


def _check_smallest_world(config: Config, smallest: int) -> None:
    batch = replace(config, data=replace(config.data, global_batch_size=smallest))
    with rule(f"minimum_world={smallest}"):
        validate_world(batch, world_size=smallest)


def _check_world(config: Config, *, world_size: int) -> None:
    """Shard a model as the first and as the last of that many ranks, and compare what they hold and what is stated."""
    for per_node in (None, world_size, world_size // 2 or 1):
        with rule(f"mesh in a world of {world_size}, {per_node} on a node"):
            sizes = mesh_sizes(config.sharding, world_size=world_size, ranks_per_node=per_node)
        assert all(isinstance(size, int) and size >= 1 for size in sizes), f"mesh={sizes}: must be two whole numbers"
    model = build_for_run(open_checkpoint(config.model, seed=0), config, dtype=torch.float32)
    stated = predict(model, config, world_size=world_size)
    first, split = _sharded(config, rank=0, world_size=world_size)
    held = first.bytes_local
    assert stated.weights + stated.heads == held, f"{stated.weights + stated.heads} bytes are stated and {held} held"
    strategy = strategy_of(config.sharding)
    idle = world_size > 1 and not strategy.splits_master and not strategy.keeps_weights_whole and not first.sharded
    assert not idle, f"nothing is split in a world of {world_size}; set minimum_world, or keeps_weights_whole=True"
    last, split_last = _sharded(config, rank=world_size - 1, world_size=world_size)
    differ = min(split ^ split_last, default="")
    assert not differ, f"{differ}: is split by the first or the last of {world_size} ranks alone; answer all alike"
    same = first.mesh == last.mesh
    assert same, f"mesh={first.mesh} on the first of {world_size} ranks, {last.mesh} on the last; answer all alike"


def _sharded(config: Config, *, rank: int, world_size: int) -> tuple[EffectiveSharding, set[str]]:
    """Shard a model as a rank; return what it then holds, and the names of the parameters that are split."""
    model = build_for_run(open_checkpoint(config.model, seed=0), config, dtype=torch.float32)
    with _simulated_world(world_size, rank=rank), rule(f"sharding as rank {rank} in a world of {world_size}"):
        effective = shard(
            model.network,
            config.sharding,
            units=model.units,
            ignored=model.unsharded,
            device_type="cpu",
            world_size=world_size,
        )
    return effective, {name for name, weight in model.network.named_parameters() if isinstance(weight, DTensor)}


@contextmanager
def _simulated_world(world_size: int, *, rank: int) -> Iterator[None]:
    """Be a rank of a process group whose collectives do nothing."""
    assert not dist.is_initialized(), "a process group is open; check strategies in a process without one"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
