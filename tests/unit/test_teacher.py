"""A frozen teacher is sharded like its student, but never waits gathered for a backward that does not come."""

from __future__ import annotations

import pytest

from rotexp.sharding.options import ShardingConfig, Strategy
from rotexp.training.teacher import frozen_sharding


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (Strategy.no_shard, Strategy.no_shard),
        (Strategy.full, Strategy.full),
        (Strategy.zero2, Strategy.full),
        (Strategy.zero2_master, Strategy.no_shard),
        (Strategy.hybrid, Strategy.hybrid),
        (Strategy.hybrid_zero2, Strategy.hybrid),
    ],
)
def test_how_a_teacher_is_sharded(student: Strategy, teacher: Strategy) -> None:
    assert frozen_sharding(ShardingConfig(student, min_shard_size=7)).strategy is teacher


def test_other_options_are_the_students() -> None:
    student = ShardingConfig(Strategy.zero2, min_shard_size=7, forward_prefetch=1)
    found = frozen_sharding(student)
    assert (found.min_shard_size, found.forward_prefetch) == (7, 1)
