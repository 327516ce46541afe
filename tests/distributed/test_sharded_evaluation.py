"""Evaluation gives the figures of one process under any sharding, whatever is kept of the float model, and when."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from ranks_float_answers import NAMES, Figures, all_figures
from world import run_world

pytestmark = pytest.mark.slow

STRATEGIES = ["no_shard", "full", "zero2"]
Ranks = list[dict[tuple[str, str], Figures]]
EXACT = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of two ranks found, and one process by itself."""
    one = run_world(all_figures, ["one"], world_size=1, folder=tmp_path_factory.mktemp("one"))
    two = run_world(all_figures, STRATEGIES, world_size=2, folder=tmp_path_factory.mktemp("two"))
    return [*one, *two]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_find_what_one_process_does(results: Ranks, name: str, strategy: str) -> None:
    one, *ranks = results
    expected = one[name, "one"]
    for rank in ranks:
        found = rank[name, strategy]
        assert found.keys() == expected.keys()
        for kind, qualities in expected.items():
            for mine, theirs in zip(found[kind], qualities, strict=True):
                np.testing.assert_allclose(astuple(mine), astuple(theirs), rtol=EXACT, atol=EXACT, err_msg=kind)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_kept_gives_the_same_figures(results: Ranks, name: str) -> None:
    figures = results[0][name, "one"]
    losses = figures.pop("loss")
    for kind, (own, *variants) in figures.items():
        others = figures[kind.partition(",")[0]]
        for mine, theirs in zip((own, *variants), others, strict=True):
            np.testing.assert_allclose(astuple(mine), astuple(theirs), rtol=EXACT, atol=EXACT, err_msg=kind)
        for variant, loss in zip(reversed(variants), reversed(losses), strict=False):
            assert variant.perplexity == pytest.approx(loss.perplexity, rel=EXACT)
