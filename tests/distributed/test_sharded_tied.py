"""A head that stays tied is one shard in one group of FSDP2's, and everything that is done with it counts it once."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_tied import OPTIONS, compare_all
from world import run_world

CASES = [*[(name, "full") for name in OPTIONS], ("olmo2", "zero2")]
Ranks = list[dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks found."""
    return run_world(compare_all, CASES, world_size=2, folder=tmp_path_factory.mktemp("tied"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_rank_holds_its_share_of_the_one_weight(results: Ranks, case: tuple[str, str]) -> None:
    for rank in results:
        found = rank[case]
        assert found["tied"]
        assert found["bytes"] == found["room"]
        assert found["groups"] == found["layers"] + 2  # the layers, embedding with head, and the final norm in the root
        assert found["digests"][0] == found["digests"][1]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_tied_model_loads_prepares_and_merges_under_sharding(results: Ranks, case: tuple[str, str]) -> None:
    for rank in results:
        for state in ("loaded", "prepared", "merged"):
            assert rank[case]["errors"][state] <= 1e-5, state
        assert rank[case]["still tied"]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_tied_weight_is_trained_once_by_the_gradient_of_one_rank(results: Ranks, case: tuple[str, str]) -> None:
    for rank in results:
        assert rank[case]["trained"] == (True, False)
        assert rank[case]["errors"]["gradient"] <= 1e-2  # a last-bit difference may flip a rounding
