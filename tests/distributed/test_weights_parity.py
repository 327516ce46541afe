"""With every parameter trained, the same seed gives the same trajectory under every sharding and world size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_resume import Job, run_jobs
from safetensors.numpy import load_file
from world import run_world

pytestmark = pytest.mark.slow

PLAIN = (
    "train.params=all",
    "train.steps=3",
    "train.lr_schedule=constant",
    "train.checkpoint_every=null",
    "evaluation.max_windows=1",
    # Rounding to 8 bits flips seldom, and both optimizers' steps are smooth where a gradient is near zero.
    "quant=w8a8",
    "optimizer.step_rule=paper",
    "optimizer.lr=0.01",
    "adamw.lr=1e-4",
    "adamw.eps=1e-3",
)
CASES = {
    1: {"one": ()},
    2: {
        "no_shard": ("train.micro_batch_size=2",),
        "full": ("train.micro_batch_size=1",),
        "zero2": (),
        "zero2_master": ("train.micro_batch_size=1",),
    },
    4: {"no_shard": (), "full": (), "zero2": (), "zero2_master": (), "hybrid": (), "hybrid_zero2": ()},
}
EVERY_CASE = [(world_size, name) for world_size, cases in CASES.items() for name in cases if world_size > 1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    """The folder of every run."""
    found = {}
    for world_size, cases in CASES.items():
        root = tmp_path_factory.mktemp(f"world{world_size}")
        sharded = {name: () if name == "one" else (f"sharding={name}",) for name in cases}
        jobs = {name: Job((*PLAIN, *sharded[name], *given)) for name, given in cases.items()}
        ranks = run_world(run_jobs, jobs, str(root), world_size=world_size, folder=root)
        assert [rank[name]["error"] for rank in ranks for name in cases] == [None] * len(cases) * world_size
        found |= {(world_size, name): root / name for name in cases}
    return found


def column(folder: Path, key: str) -> list[Any]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in rows if "train/loss" in row]


@pytest.mark.parametrize(("world_size", "name"), EVERY_CASE)
def test_the_trajectory_is_that_of_one_process(folders: Any, world_size: int, name: str) -> None:
    one, found = folders[1, "one"], folders[world_size, name]
    for key in ("train/loss", "grad_norm/total", "grad_norm/rotations", "grad_norm/weights"):
        np.testing.assert_allclose(column(found, key)[0], column(one, key)[0], rtol=1e-5, err_msg=key)
    np.testing.assert_allclose(column(found, "train/loss"), column(one, "train/loss"), rtol=1e-5)


@pytest.mark.parametrize(("world_size", "name"), EVERY_CASE)
def test_weights_and_rotations_are_those_of_one_process(folders: Any, world_size: int, name: str) -> None:
    for file in ("weights", "rotations"):
        expected, found = (
            load_file(folders[case] / f"{file}.safetensors") for case in ((1, "one"), (world_size, name))
        )
        assert found.keys() == expected.keys()
        for tensor, values in expected.items():
            np.testing.assert_allclose(found[tensor], values, rtol=0, atol=1e-5, err_msg=tensor)


def test_weights_move_far_more_than_cases_may_differ(folders: Any) -> None:
    weights = load_file(folders[1, "one"] / "weights.safetensors")
    gains = np.concatenate([weight for name, weight in weights.items() if "norm" in name])
    assert np.abs(gains - 1.0).max() > 1e-4  # where norms are folded, gains start from one
    assert column(folders[1, "one"], "train/loss")[2] < column(folders[1, "one"], "train/loss")[0] + 0.1
