"""With every parameter trained, at default rates, a step from one state is the same in every world, up to rounding."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_resume import Job, read_checkpoint, run_jobs
from world import run_world

from rotexp.runfolder.checkpoint_folders import step_folder
from rotexp.training.options import AdamWConfig

pytestmark = pytest.mark.slow

PLAIN = (
    "train.params=all",
    "train.steps=3",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=3",
    "evaluation.max_windows=1",
)
CASES = {
    2: {
        "no_shard": ("train.micro_batch_size=2",),
        "full": ("train.micro_batch_size=1",),
        "zero2": (),
        "zero2_master": ("train.micro_batch_size=1",),
    },
    4: {"no_shard": (), "full": (), "zero2": (), "zero2_master": (), "hybrid": (), "hybrid_zero2": ()},
}
EVERY_CASE = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of one process."""
    root = tmp_path_factory.mktemp("world1")
    run_world(run_jobs, {"one": Job(PLAIN)}, str(root), world_size=1, folder=root)
    return root / "one"


@pytest.fixture(scope="module")
def folders(one: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, int], Path]:
    """The folders of all others, by the only step that they take: the first, or the third after two of one process."""
    found = {}
    for world_size, cases in CASES.items():
        root = tmp_path_factory.mktemp(f"world{world_size}")
        jobs = {}
        for name, given in cases.items():
            overrides = (*PLAIN, *given, f"sharding={name}")
            jobs[f"{name} 1"] = Job((*overrides, "train.steps=1"))
            jobs[f"{name} 3"] = Job(overrides, str(step_folder(one, 2)))
        ranks = run_world(run_jobs, jobs, str(root), world_size=world_size, folder=root)
        assert [rank[name]["error"] for rank in ranks for name in jobs] == [None] * len(jobs) * world_size
        found |= {(world_size, name, step): root / f"{name} {step}" for name in cases for step in (1, 3)}
    return found


def row(folder: Path, step: int) -> dict[str, Any]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (found,) = [row for row in rows if "train/loss" in row and row["step"] == step]
    return found


@cache
def after(folder: Path, step: int) -> dict[str, np.ndarray]:
    return read_checkpoint(step_folder(folder, step))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(("world_size", "name"), EVERY_CASE)
def test_loss_and_norms_of_a_step_are_those_of_one_process(
    one: Path, folders: Any, world_size: int, name: str, step: int
) -> None:
    found, expected = row(folders[world_size, name, step], step), row(one, step)
    for key in ("train/loss", "grad_norm/total", "grad_norm/rotations", "grad_norm/weights"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(("world_size", "name"), EVERY_CASE)
def test_a_step_leaves_what_it_leaves_in_one_process(
    one: Path, folders: Any, world_size: int, name: str, step: int
) -> None:
    """AdamW moves a number by its rate at most, into either direction where the gradient is all but zero."""
    found, expected = after(folders[world_size, name, step], step), after(one, step)
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        if tensor.startswith("rotations/"):
            np.testing.assert_allclose(found[tensor], values, rtol=0, atol=1e-5, err_msg=tensor)
        if tensor.endswith(("/exp_avg", "/exp_avg_sq")):
            limit = 1e-5 * np.abs(values).max()
            np.testing.assert_allclose(found[tensor], values, rtol=0, atol=limit, err_msg=tensor)
        if tensor.startswith("weights/"):
            apart = np.abs(found[tensor] - values)
            assert apart.max() <= 2.1 * AdamWConfig.lr
            assert apart.mean() < 1e-3 * AdamWConfig.lr


def test_weights_move_far_more_than_cases_may_differ(one: Path) -> None:
    first, last = after(one, 1), after(one, 3)
    for tensor, values in first.items():
        if tensor.startswith("weights/"):
            assert np.abs(last[tensor] - values).max() > 0.3 * AdamWConfig.lr, tensor  # few rows of the embedding do
