"""Sharded, families stay what they are: prepared and merged, whatever sizes the ranks cannot share evenly."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_families import CHANGES, compare_all
from world import run_world

pytestmark = pytest.mark.slow

STRATEGIES = {2: ["full"], 4: ["full", "hybrid"]}
CASES = [
    (size, strategy, name) for size, strategies in STRATEGIES.items() for strategy in strategies for name in CHANGES
]
Ranks = list[dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    """What every rank of every world found."""
    return {
        size: run_world(compare_all, strategies, world_size=size, folder=tmp_path_factory.mktemp(f"world{size}"))
        for size, strategies in STRATEGIES.items()
    }


@pytest.mark.parametrize(("world_size", "strategy", "name"), CASES)
def test_sharded_logits_equal_the_originals(
    results: dict[int, Ranks], world_size: int, strategy: str, name: str
) -> None:
    for rank in results[world_size]:
        found = rank[name, strategy]
        for state in ("loaded", "prepared", "merged"):
            assert found["errors"][state] <= 1e-5, state
        assert found["rotations"] == ["R1", "R2_0", "R2_1"]
        assert found["mesh"] == ((2, 2) if strategy == "hybrid" else (world_size,))
        assert found["replicated"] == 0
        assert found["parts"] > (2 if strategy == "hybrid" else world_size) * 0.7


@pytest.mark.parametrize(("world_size", "strategy", "name"), CASES)
def test_sharded_and_quantized_it_learns_and_merges_as_whole(
    results: dict[int, Ranks], world_size: int, strategy: str, name: str
) -> None:
    for rank in results[world_size]:
        found = rank[name, strategy]
        assert found["effect"] > 0.05
        assert found["errors"]["gradients"] <= 1e-5
        assert found["errors"]["merged, quantized"] <= found["effect"] / 10  # a last-bit difference may flip a rounding


@pytest.mark.parametrize("name", ["opt", "gpt_neox"])
def test_heads_get_their_biases_under_sharding(results: dict[int, Ranks], name: str) -> None:
    for ranks in results.values():
        assert all(rank[name, "full"]["added"] == 1 for rank in ranks)
