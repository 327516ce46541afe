"""A user's optimizer, scheduler and start leave every rank with the same bits, and go on from a checkpoint anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_experiment import run_with_parts
from world import run_world

pytestmark = pytest.mark.slow

PARTS = Path(__file__).parents[1] / "parts"
THEIRS = [
    "plugins=[their_parts]",
    f"hydra.searchpath=[file://{PARTS}]",
    "optimizer=heavy_ball",
    "train/scheduler=trapezoid",
    "rotation/start=householder",
    "train.warmup_steps=1",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=3",
]
ALL = [*THEIRS, "train.params=all", "ema.decay=0.5"]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By size: what each rank saw of the run, and of its last step alone, from one process's checkpoint of two."""
    folder = tmp_path_factory.mktemp("parts")
    found = {}
    for world_size in (1, 2):
        shards = ["sharding=full"] if world_size > 1 else []
        again = [*ALL, *shards, f"resume={folder}/1/two"]
        cases = {"whole": [*ALL, *shards], "again": again} | ({} if shards else {"two": [*ALL, "train.steps=2"]})
        cases = {name: cases[name] for name in ("whole", "two", "again") if name in cases}
        inside = folder / str(world_size)
        inside.mkdir()
        found[world_size] = run_world(
            run_with_parts, cases, str(inside), str(PARTS), world_size=world_size, folder=inside
        )
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_ranks_hold_the_same_bits_after_every_step(worlds: dict[int, list[dict[str, Any]]]) -> None:
    for case in ("whole", "again"):
        first, second = (rank[case]["stepped"] for rank in worlds[2])
        assert first
        assert all(same(one, other) for one, other in zip(first, second, strict=True))


def test_the_schedule_goes_on_under_the_options_of_the_new_run(worlds: dict[int, list[dict[str, Any]]]) -> None:
    """The checkpoint is of a run of two steps, whose rate would be at its end; that of the third of three is meant."""
    (one,) = worlds[1]
    assert one["again"]["rows"][-1]["train/lr"] == one["whole"]["rows"][-1]["train/lr"]
    assert len(one["again"]["stepped"]) == 1


def test_worlds_make_the_same_last_step_from_one_checkpoint(worlds: dict[int, list[dict[str, Any]]]) -> None:
    one, two = worlds[1][0]["again"], worlds[2][0]["again"]
    assert one["rows"][-1]["train/loss"] == pytest.approx(two["rows"][-1]["train/loss"], rel=1e-4)
    for name, rotation in one["stepped"][0].items():
        np.testing.assert_allclose(two["stepped"][0][name], rotation, rtol=0, atol=2e-3)
