"""Sharded models are read in chunks as whole ones are, and learn so; their heads are gathered no more often."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks_readout import NAMES, compare_all
from world import run_world

pytestmark = pytest.mark.slow

STRATEGIES = ["full", "zero2"]
Ranks = list[dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What every rank found."""
    return run_world(compare_all, STRATEGIES, world_size=2, folder=tmp_path_factory.mktemp("readout"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_states_of_every_age_give_the_whole_models_logits(results: Ranks, name: str, strategy: str) -> None:
    for rank in results:
        errors = rank[name, strategy]["errors"]
        assert [len(found) for found in errors.values()] == [1, 2, 3, 3]
        assert max(max(found) for found in errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_gather_as_often_as_whole_logits(results: Ranks, name: str, strategy: str) -> None:
    for rank in results:
        whole, chunked = rank[name, strategy]["unshards"]
        assert chunked == whole > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_losses_in_chunks_have_the_whole_models_gradients(results: Ranks, name: str, strategy: str) -> None:
    for rank in results:
        for kind, found in rank[name, strategy]["trained"].items():
            assert found["loss"] <= 1e-5, kind
            assert max(found["errors"].values()) <= 1e-4, kind  # summed over ranks in another order


def test_a_policy_that_casts_outputs_does_not_round_the_loss(results: Ranks) -> None:
    for rank in results:
        for found in rank["cast", "full"].values():
            assert found["value"].dtype is torch.float32
            assert found["value"] != found["value"].to(torch.bfloat16)
            assert all(math.isfinite(error) for error in found["errors"].values())  # layers' outputs are rounded, too
