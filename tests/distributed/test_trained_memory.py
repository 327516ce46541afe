"""Each rank that trains more than rotations holds what the closed forms say, to the byte, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_memory import measure_all
from world import run_world

from rotexp.config import Dtype

pytestmark = pytest.mark.slow

COUNT_BYTES, UPDATES_BYTES = 4, 8
"""AdamW's count of steps of each tensor, and the average's count of updates, which the closed forms leave out."""

TWO: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "full": {"strategy": "full"},
    "zero2, small ones whole": {"strategy": "zero2", "min_shard_size": 64},
    "full, distilling": {"strategy": "full", "distills": True},
    "full, scales": {"strategy": "full", "params": "rotations_and_scales"},
    "zero2": {"strategy": "zero2"},
    "zero2, gathered in bf16": {"strategy": "zero2", "param_dtype": Dtype.bfloat16},
    "zero2, norms": {"strategy": "zero2", "params": "rotations_and_norms"},
    "zero2_master": {"strategy": "zero2_master", "bucket_mib": 0.01},
    "zero2_master in bf16": {"strategy": "zero2_master", "dtype": "bfloat16"},
    "zero2_master, distilling": {"strategy": "zero2_master", "distills": True},
}
FOUR: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "hybrid": {"strategy": "hybrid"},
    "hybrid_zero2": {"strategy": "hybrid_zero2"},
    "zero2_master": {"strategy": "zero2_master"},
}
CASES = [(2, name) for name in TWO] + [(4, name) for name in FOUR]
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """What every rank of both worlds found."""
    return {
        world_size: run_world(measure_all, cases, world_size=world_size, folder=tmp_path_factory.mktemp("memory"))
        for world_size, cases in ((2, TWO), (4, FOUR))
    }


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_every_rank_holds_what_its_closed_form_says(
    results: dict[int, list[Found]], world_size: int, name: str
) -> None:
    for rank in results[world_size]:
        found = rank[name]
        counts = COUNT_BYTES * found["num_trained"] + UPDATES_BYTES
        assert found["measured"] == {moment: held + counts for moment, held in found["predicted"].items()}


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_no_rank_holds_more_than_the_first(results: dict[int, list[Found]], world_size: int, name: str) -> None:
    totals = [rank[name]["kinds"]["total"] for rank in results[world_size]]
    assert totals[0] == max(totals)


def test_strategies_divide_what_they_say(results: dict[int, list[Found]]) -> None:
    held = {name: found["kinds"] for name, found in results[2][0].items()}
    whole, full, master = held["no_shard"], held["full"], held["zero2_master"]
    for kind in ("weights", "heads", "gradients", "moments", "shadows"):
        assert 0.5 * whole[kind] <= full[kind] < 0.6 * whole[kind]
    assert master["weights"] == whole["weights"]
    assert master["gradients"] == whole["gradients"]
    assert 0.5 * whole["moments"] <= master["moments"] < 0.6 * whole["moments"]
    assert held["zero2_master in bf16"]["weights"] == master["weights"] // 2
    assert held["zero2_master in bf16"]["master"] == master["master"]
    assert held["zero2"]["gathered"] == 2 * held["zero2, gathered in bf16"]["gathered"] > whole["weights"]
    assert full["gathered"] == 0
    assert held["full, distilling"]["teacher"] == full["weights"] + full["heads"] + full["buffers"]


def test_ranks_with_fewer_rows_have_smaller_moments(results: dict[int, list[Found]]) -> None:
    moments = [rank["full"]["kinds"]["moments"] for rank in results[4]]
    assert moments[0] > moments[-1]
    assert len({rank["full"]["kinds"]["weights"] for rank in results[4]}) == 1  # FSDP pads these
