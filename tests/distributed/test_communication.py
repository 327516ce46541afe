"""What a step's row says of collectives is what torch's dispatcher saw rotexp issue, by number and bytes."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_communication import count_steps
from world import run_world

DEFAULTS = ["model=random_llama", "optimizer.lr=0.1", "train.checkpoint_every=2", "metrics.divergence_every=2"]
ALL = ["train.params=all", "ema.decay=0.9"]
CASES = {
    2: {
        "no_shard": [*ALL],
        "full": ["sharding=full"],
        "zero2_master": ["sharding=zero2_master", "train.micro_batch_size=2", *ALL],
    },
    4: {
        "full": ["sharding=full", "train.micro_batch_size=1", "objective=kl"],
        "hybrid": ["sharding=hybrid", "sharding.min_shard_size=1000", *ALL],
        "zero2_master": ["sharding=zero2_master", "train.params=rotations_and_norms"],
    },
}
pytestmark = pytest.mark.slow

EVERY = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank counted in every case, by world size."""
    found = {}
    for world_size, cases in CASES.items():
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        jobs = {name: [*DEFAULTS, *overrides] for name, overrides in cases.items()}
        found[world_size] = run_world(count_steps, jobs, str(folder), world_size=world_size, folder=folder)
    return found


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_rows_count_what_the_dispatcher_saw(results: Any, world_size: int, name: str) -> None:
    for rank in results[world_size]:
        found = rank[name]
        assert found["said"] == found["seen"], found["kinds"]
        assert all(count > 0 and num_bytes > 0 for count, num_bytes in found["said"])
        assert found["neither"] == (0, 0), "a collective of nobody's"


def test_what_is_told_apart_is_there(results: Any) -> None:
    """Own rows are exchanged inside FSDP2's gathers, which are not counted; the master gathers and scatters itself."""
    for world_size in CASES:
        kinds = {name: results[world_size][0][name]["kinds"] for name in CASES[world_size]}
        assert kinds["full"]["rotexp alltoall_base_"] > 0
        assert kinds["full"]["fsdp _allgather_base_"] > 0
        assert kinds["zero2_master"]["rotexp _reduce_scatter_base_"] > 0
        assert kinds["zero2_master"]["rotexp _allgather_base_"] > 0
    assert results[4][0]["hybrid"]["kinds"]["fsdp allreduce_"] > 0
