"""How a teacher is sharded beside its student: alike, but nothing waits gathered for a backward that does not come."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from rotexp.sharding.applying import shard
from rotexp.sharding.guard import param_groups
from rotexp.sharding.options import ShardingConfig


@pytest.mark.parametrize(
    ("strategy", "student_frees"), [("full", True), ("zero2", False), ("hybrid", True), ("hybrid_zero2", False)]
)
def test_a_teacher_frees_what_it_gathered(strategy: str, student_frees: bool) -> None:
    for frozen in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            shard(
                model,
                ShardingConfig(strategy),
                units=[*model],
                ignored=set(),
                device_type="cpu",
                world_size=4,
                frozen=frozen,
            )
        finally:
            dist.destroy_process_group()
        assert all(isinstance(unit, FSDPModule) for unit in model)
        groups = param_groups(model)
        assert len(groups) == 2
        for group in groups:
            assert group._reshard_after_forward is (frozen or student_frees)


@pytest.mark.parametrize("strategy", ["no_shard", "zero2_master"])
def test_whole_weights_stay_whole(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    options = ShardingConfig(strategy)
    shard(model, options, units=[*model], ignored=set(), device_type="cpu", world_size=2, frozen=True)
    assert type(model[0]) is nn.Linear
