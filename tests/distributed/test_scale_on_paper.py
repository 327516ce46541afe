"""What `benchmarks.scale` says of a step without weights or ranks is what real ranks count, at any depth."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ranks_scale import count_all
from world import run_world

from benchmarks.ranks import RankRequest
from benchmarks.scale import VARIANTS, count_deep, count_step
from benchmarks.variants import llama_shape
from rotexp.sharding.strategies import STRATEGIES

pytestmark = pytest.mark.slow

TOKENS = 32
NANO = llama_shape("nano")
WORLDS = {2: [name for name in STRATEGIES if "hybrid" not in name], 4: ["hybrid", "hybrid_zero2", "full"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_paper_says_what_ranks_count(world_size: int, dtype: str, tmp_path: Path) -> None:
    requests = [
        RankRequest(variant=variant, model="nano", strategy=strategy, batch=world_size, tokens=TOKENS, dtype=dtype)
        for strategy, variant in itertools.product(WORLDS[world_size], VARIANTS)
    ]
    counted = run_world(count_all, requests, world_size=world_size, folder=tmp_path)
    for index, request in enumerate(requests):
        said = count_step(NANO, request, world_size=world_size)
        assert (said["flops"], said["received_bytes"]) == counted[0][index], request
        assert counted[-1][index] == counted[0][index], "every rank does the same"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", ["full", "zero2"])
def test_two_depths_tell_of_a_deep_model(strategy: str, variant: str) -> None:
    deep = NANO | {"num_hidden_layers": 6}
    request = RankRequest(variant=variant, model="nano", strategy=strategy, batch=2, tokens=TOKENS)
    assert count_deep(deep, request, world_size=2) == count_step(deep, request, world_size=2)
