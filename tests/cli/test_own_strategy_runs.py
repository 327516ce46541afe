"""A run of two ranks under the example's strategy: its losses and checkpoints are those of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_train import Run, run_train, saved_tensors

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "last_layers"
OWN = ["--config-dir", "conf", "plugins=[last_layers]", "sharding=last_layers", "sharding.count=1"]
SAME = ["tracker=jsonl", "train.params=all", "objective=kl", "train.checkpoint_every=1"]


@pytest.fixture(scope="module")
def runs(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("own")
    return {
        "own": run_train(folder / "own", *OWN, *small, *SAME, cwd=EXAMPLE),
        "whole": run_train(folder / "whole", *small, *SAME),
    }


def test_losses_and_held_out_figures_are_those_of_one_rank(runs: dict[str, Run]) -> None:
    own, whole = runs["own"], runs["whole"]
    assert (own.code, own.errors, own.left_behind) == (0, "", [])
    assert (own.summary["world_size"], whole.summary["world_size"]) == (2, 1)
    for key in ("train/loss", "grad_norm/total"):
        np.testing.assert_allclose(own.steps[0][key], whole.steps[0][key], rtol=1e-4)
    assert own.perplexities == pytest.approx(whole.perplexities, rel=1e-3)
    assert own.summary["replica"]["max_abs_diff"] == 0.0


def test_a_rank_holds_what_was_stated(runs: dict[str, Run]) -> None:
    sharding, static = runs["own"].summary["sharding"], runs["own"].summary["static_bytes"]
    effective = sharding["effective"]
    assert sharding["strategy"] == "LastLayers"
    assert effective["mesh"] == [2]
    assert min(effective["sharded"], effective["replicated"]) > 0
    assert static["weights"] + static["heads"] == effective["bytes_local"] < effective["bytes_full"]
    assert static["teacher"] > 0


def test_a_checkpoint_holds_the_same_tensors(runs: dict[str, Run]) -> None:
    own, whole = (saved_tensors(run.folder, 1) for run in (runs["own"], runs["whole"]))
    assert own.keys() == whole.keys()
    for name in own:
        if name.startswith(("weights/", "rotations/")):
            np.testing.assert_allclose(own[name], whole[name], atol=2e-4)
