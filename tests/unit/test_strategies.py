"""Mesh sizes, precision presets and reading back, without any process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rotexp.sharding.applying import check_effective, precision_policy, read_back, shard
from rotexp.sharding.options import Dtype, Precision, ShardingConfig
from rotexp.sharding.strategies import mesh_sizes


@pytest.mark.parametrize(
    ("options", "world_size", "ranks_per_node", "sizes"),
    [
        ({"strategy": "no_shard"}, 4, None, (4, 1)),
        ({"strategy": "full"}, 4, None, (1, 4)),
        ({"strategy": "zero2"}, 2, None, (1, 2)),
        ({"strategy": "hybrid"}, 4, 4, (2, 2)),
        ({"strategy": "hybrid"}, 16, 8, (2, 8)),
        ({"strategy": "hybrid_zero2", "shard": 4}, 16, 8, (4, 4)),
        ({"strategy": "hybrid", "replicate": 4}, 16, 8, (4, 4)),
        ({"strategy": "hybrid", "replicate": 2, "shard": 3}, 6, None, (2, 3)),
    ],
)
def test_mesh_sizes(options: Any, world_size: int, ranks_per_node: int | None, sizes: tuple[int, int]) -> None:
    assert mesh_sizes(ShardingConfig(**options), world_size=world_size, ranks_per_node=ranks_per_node) == sizes


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({"replicate": 2, "shard": 3}, 4),
        ({"replicate": 4}, 4),
        ({"shard": 4}, 4),
        ({"replicate": 3}, 4),
        ({}, 2),
        ({}, 5),
    ],
)
def test_world_sizes_that_do_not_fit_are_refused_with_the_numbers(options: Any, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"sharding\.replicate=\d+ sharding\.shard=\d+: .* {world_size} ranks"):
        mesh_sizes(ShardingConfig("hybrid", **options), world_size=world_size)


def test_presets_and_what_overrides_them() -> None:
    bf16 = precision_policy(ShardingConfig(precision=Precision.bf16))
    assert (bf16.param_dtype, bf16.reduce_dtype, bf16.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert precision_policy(ShardingConfig(precision=Precision.fp16)).param_dtype is torch.float16
    mixed = ShardingConfig(precision=Precision.bf16, reduce_dtype=Dtype.bfloat16, output_dtype=Dtype.float32)
    policy = precision_policy(mixed)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert not precision_policy(ShardingConfig(cast_forward_inputs=False)).cast_forward_inputs
    assert precision_policy(ShardingConfig()).param_dtype is None


def test_an_unsharded_model_reads_back_as_replicated() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, bias=False))
    effective = read_back(model, ignored={model[1].weight})
    assert (effective.sharded, effective.replicated, effective.ignored) == (0, 2, 1)
    assert effective.bytes_full == effective.bytes_local == 4 * (32 + 8)
    assert effective.reduction == 1.0
    assert "0 parameters sharded" in effective.line()


def test_a_model_that_is_not_sharded_as_asked_stops_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"sharding=full: weight is whole, which was not asked for"):
        check_effective(nn.Linear(4, 4), ShardingConfig("full"), units=[], ignored=set(), world_size=2)


def test_no_shard_leaves_the_model_as_it_is() -> None:
    model = nn.Linear(4, 4)
    effective = shard(model, ShardingConfig(), units=[], ignored=set(), device_type="cpu", world_size=1)
    assert effective.mesh == ()
    assert type(model) is nn.Linear
