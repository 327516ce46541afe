"""Sharded, families stay what they are: prepared and merged, whatever sizes the ranks cannot share evenly."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_families import CHANGES, compare_all
from world import run_world

pytestmark = pytest.mark.slow

WORLDS = {2: [("full", "w4a4kv4"), ("full", "w16a4")], 4: [("full", "w4a4kv4"), ("hybrid", "w4a4kv4")]}
CASES = [(size, *case, name) for size, cases in WORLDS.items() for case in cases for name in CHANGES]
Ranks = list[dict[tuple[str, str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    """What every rank of every world found."""
    return {
        size: run_world(compare_all, cases, world_size=size, folder=tmp_path_factory.mktemp(f"world{size}"))
        for size, cases in WORLDS.items()
    }


@pytest.mark.parametrize(("world_size", "strategy", "quant", "name"), CASES)
def test_sharded_logits_equal_the_originals(
    results: dict[int, Ranks], world_size: int, strategy: str, quant: str, name: str
) -> None:
    for rank in results[world_size]:
        found = rank[strategy, quant, name]
        for state in ("loaded", "prepared", "merged"):
            assert found["errors"][state] <= 1e-5, state
        assert found["rotations"] == ["R1", "R2_0", "R2_1"]
        assert found["mesh"] == ((2, 2) if strategy == "hybrid" else (world_size,))
        assert found["replicated"] == 0
        assert found["parts"] > (2 if strategy == "hybrid" else world_size) * 0.7


@pytest.mark.parametrize(("world_size", "strategy", "quant", "name"), CASES)
def test_sharded_and_quantized_it_learns_and_merges_as_whole(
    results: dict[int, Ranks], world_size: int, strategy: str, quant: str, name: str
) -> None:
    for rank in results[world_size]:
        found = rank[strategy, quant, name]
        assert found["effect"] > 0.05
        assert found["errors"]["gradients"] <= 1e-5
        assert found["errors"]["merged, quantized"] <= found["effect"] / 10  # a last-bit difference may flip a rounding


@pytest.mark.parametrize("name", ["opt", "gpt_neox"])
def test_heads_get_their_biases_under_sharding(results: dict[int, Ranks], name: str) -> None:
    for ranks in results.values():
        assert all(rank["full", "w4a4kv4", name]["added"] == 1 for rank in ranks)
