"""Sharded, everything trained gets the whole model's gradients from the same global batch, and merges."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_trainable import compare_all
from world import run_world

from rotexp.training.options import Trainable

pytestmark = pytest.mark.slow

WORLD_SIZE = 2
NAMES = ["mixtral", "qwen2", "gpt_neox"]
"""Experts, a head that was tied, norms that become others; no width or vocabulary is even."""

CASES = [
    *[(name, "full", params.name) for name in NAMES for params in Trainable],
    *[("mixtral", "zero2", params.name) for params in Trainable],
]
Case = tuple[str, str, str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, dict[str, Any]]]:
    """What every rank found."""
    return run_world(compare_all, CASES, world_size=WORLD_SIZE, folder=tmp_path_factory.mktemp("trainable"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gradients_are_those_of_one_rank_on_the_same_batch(
    results: list[dict[Case, dict[str, Any]]], case: Case
) -> None:
    for rank in results:
        found = rank[case]
        assert found["trained"]
        assert found["started"]
        assert found["keys"]
        for key, error in found["errors"].items():
            assert error <= 1e-5 or found["largest"][key] <= 1e-6, key  # softmax ignores what all keys share


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_what_is_trained_is_sharded_but_for_scales(results: list[dict[Case, dict[str, Any]]], case: Case) -> None:
    for rank in results:
        found = rank[case]
        assert (found["num_trained"] == 0) is (case[2] == "rotations")
        assert found["num_sharded"] == (0 if case[2] == "rotations_and_scales" else found["num_trained"])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_trained_weights_merge_under_sharding(results: list[dict[Case, dict[str, Any]]], case: Case) -> None:
    for rank in results:
        assert rank[case]["moved"] <= 1e-5
        assert rank[case]["merged"] <= 1e-5
