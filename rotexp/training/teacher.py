"""A second, frozen model to distill from and to compare with, for where training changes the float model itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rotexp.config.schema import Config
from rotexp.models.materialize import materialize
from rotexp.models.stored_model import StoredModel
from rotexp.rotation.building import build_plain
from rotexp.sharding.communication import Communication
from rotexp.sharding.guard import install
from rotexp.sharding.options import ShardingConfig, Strategy
from rotexp.sharding.strategies import precision_policy, shard
from rotexp.training.objectives import Teacher

NO_BACKWARD = {Strategy.zero2: Strategy.full, Strategy.hybrid_zero2: Strategy.hybrid}


def load_teacher(
    checkpoint: StoredModel,
    config: Config,
    *,
    device: torch.device,
    communication: Communication,
    ranks_per_node: int | None,
) -> Teacher:
    """Read the checkpoint once more, sharded and guarded like the student, without rotations and quantizers.

    Raises:
        ValueError: its weights cannot be read (any more), on all ranks alike if so on one.
    """
    sharding = frozen_sharding(config.sharding)
    model = build_plain(checkpoint, dtype=getattr(torch, config.model.dtype.name))
    shard(
        model.network,
        sharding,
        units=model.units,
        ignored=set(),
        device_type=device.type,
        world_size=communication.world_size,
        ranks_per_node=ranks_per_node,
    )
    install(model.network, config.sync_mode, name=teacher_name(checkpoint))
    materialize(
        model.network,
        checkpoint,
        device=device,
        compute_dtype=precision_policy(sharding).param_dtype,
        communication=communication,
    )
    checkpoint.weights.release()

    @torch.no_grad()
    def teacher(token_ids: Tensor) -> Tensor:
        return model.logits(token_ids)

    return teacher


def teacher_name(checkpoint: StoredModel) -> str:
    """Return what the second model is called beside the first, which has the checkpoint's name."""
    return f"{checkpoint.identity} (teacher)"


def frozen_sharding(config: ShardingConfig) -> ShardingConfig:
    """Return how a frozen model is sharded beside one that is trained so.

    It is whole where there is nothing to split, and never waits gathered for a backward that does not come.
    """
    if config.strategy is Strategy.zero2_master:
        return ShardingConfig()
    return replace(config, strategy=NO_BACKWARD.get(config.strategy, config.strategy))
