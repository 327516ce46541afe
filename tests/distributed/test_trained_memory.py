"""Each rank that trains rotations, or more, holds what the closed forms say, to the byte, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_memory import measure_all
from world import run_world

from rotexp.sharding.options import Dtype

pytestmark = pytest.mark.slow

COUNT_BYTES, UPDATES_BYTES = 4, 8
"""AdamW's count of steps of each tensor, and the average's count of updates, which the closed forms leave out."""

OWN_ROWS: dict[str, Any] = {"params": "rotations", "wire": 0}
"""Bytes over the wire cost nothing, so every weight is divided of which ranks can have equally many rows.

Not under `zero2` with a teacher, which needs the weights that stay gathered, and 4 ranks share none of these evenly.
"""

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
    "no_shard, tied": {"strategy": "no_shard", "r1": False},
    "full, tied, distilling": {"strategy": "full", "r1": False, "distills": True},
    "zero2, tied": {"strategy": "zero2", "r1": False},
    "zero2_master, tied": {"strategy": "zero2_master", "r1": False},
    "zero2_master, distilling": {"strategy": "zero2_master", "distills": True},
    "no_shard, rotations": {"strategy": "no_shard", "params": "rotations"},
    "full, rotations": {"strategy": "full", "params": "rotations"},
    "full, own rows": OWN_ROWS | {"strategy": "full"},
    "full, own rows in bf16": OWN_ROWS | {"strategy": "full", "dtype": "bfloat16"},
    "full, own rows, gathered in bf16": OWN_ROWS | {"strategy": "full", "param_dtype": Dtype.bfloat16},
    "full, own rows, distilling": OWN_ROWS | {"strategy": "full", "distills": True},
    "zero2, own rows": OWN_ROWS | {"strategy": "zero2"},
    "zero2, rotations, distilling": OWN_ROWS | {"strategy": "zero2", "distills": True},
}
FOUR: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "hybrid": {"strategy": "hybrid"},
    "hybrid_zero2": {"strategy": "hybrid_zero2"},
    "zero2_master": {"strategy": "zero2_master"},
    "full, rotations": OWN_ROWS | {"strategy": "full"},
    "hybrid, own rows": OWN_ROWS | {"strategy": "hybrid"},
    "hybrid_zero2, own rows": OWN_ROWS | {"strategy": "hybrid_zero2"},
}
TIED = {
    "no_shard": "no_shard, tied",
    "full": "full, tied, distilling",
    "zero2": "zero2, tied",
    "zero2_master": "zero2_master, tied",
}
"""Those whose head stays tied, by their strategy."""

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
    assert held["full, distilling"]["teacher"] == full["weights"] + full["heads"] // 2 + full["buffers"]


def test_a_head_that_stays_tied_is_held_once_with_all_that_training_adds(results: dict[int, list[Found]]) -> None:
    """The model of these runs is tied; R1 parts its head from the embedding, and without R1 it is one weight."""
    for strategy in ("no_shard", "full", "zero2", "zero2_master"):
        tied, parted = (results[2][0][name]["kinds"] for name in (TIED[strategy], strategy))
        heads = parted["heads"] // 2
        assert tied["heads"] == heads
        assert parted["gradients"] - tied["gradients"] == heads
        saved = {kind: parted[kind] - tied[kind] for kind in ("moments", "shadows", "master", "gathered")}
        rotations = parted["bank_gradients"] - tied["bank_gradients"]
        share = heads // 2 if strategy == "zero2_master" else heads
        assert saved["moments"] == pytest.approx(2 * share, rel=0.02)
        assert saved["shadows"] - rotations == pytest.approx(share, rel=0.02)
        assert saved["master"] == pytest.approx(share if strategy == "zero2_master" else 0, rel=0.02)
        assert saved["gathered"] == (2 * heads if strategy == "zero2" else 0)
    assert results[2][0][TIED["full"]]["kinds"]["teacher"] == results[2][0]["full, distilling"]["kinds"]["teacher"]


@pytest.mark.parametrize(("world_size", "name"), [case for case in CASES if "own rows" in case[1]])
def test_dividing_takes_a_copy_of_the_rotations_and_own_rows_as_codes(
    results: dict[int, list[Found]], world_size: int, name: str
) -> None:
    whole = results[2][0]["no_shard, rotations"]["kinds"]
    rows, own = 156, 72 // 2  # of a layer; of the attention's, which two ranks share evenly (the others are 27 wide)
    for rank in results[world_size]:
        kinds = rank[name]["kinds"]
        assert kinds["divided_sums"] == kinds["bank_gradients"]
        assert kinds["divided_codes"] == 3 * own * (30 + 3 * 4)
        assert kinds["clip_ratios"] * rows == whole["clip_ratios"] * (rows - own)


@pytest.mark.parametrize(("world_size", "name"), [(2, "zero2, rotations, distilling"), (4, "full, rotations")])
def test_what_is_not_divided_takes_nothing_more(results: dict[int, list[Found]], world_size: int, name: str) -> None:
    whole = results[2][0]["no_shard, rotations"]["kinds"]
    for rank in results[world_size]:
        kinds = rank[name]["kinds"]
        assert kinds["divided_sums"] == kinds["divided_codes"] == 0
        assert [kinds[kind] for kind in ("clip_ratios", "bank")] == [whole[kind] for kind in ("clip_ratios", "bank")]


def test_ranks_with_fewer_rows_have_smaller_moments(results: dict[int, list[Found]]) -> None:
    moments = [rank["full"]["kinds"]["moments"] for rank in results[4]]
    assert moments[0] > moments[-1]
    assert len({rank["full"]["kinds"]["weights"] for rank in results[4]}) == 1  # FSDP pads these
