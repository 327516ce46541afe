"""A model whose heads are so many and so wide as Gemma 3 270M's trains on one and more threads, on one rank and two."""

import math
from pathlib import Path

import pytest
from run_train import run_train

LAYERS, HEAD_DIM = 18, 256


@pytest.mark.parametrize(
    ("ranks", "threads"),
    [
        (1, 2),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(1, 4, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_moves_rotations_and_they_stay_orthogonal(
    wide_checkpoint: Path, small: list[str], tmp_path: Path, ranks: int, threads: int
) -> None:
    kept = [override for override in small if not override.startswith(("model.path=", "launch.threads="))]
    job = [*kept, f"model.path={wide_checkpoint}", f"launch.threads={threads}", "tracker=jsonl"]
    ranked = ["sharding=full", "launch.nproc=2"] if ranks == 2 else []
    run = run_train(tmp_path / "run", *job, *ranked, timeout=280)
    assert (run.code, run.errors) == (0, "")
    assert len(run.steps) == 2
    assert all(math.isfinite(row["train/loss"]) for row in run.steps)
    heads = [rotation for rotation in run.rotations.values() if rotation.shape[-1] == HEAD_DIM]
    assert len(heads) == LAYERS
    for row in run.summary["rotations"]:  # before the projection, which makes anything orthogonal
        assert row["orthogonality_rrt_max"] < 1e-6
        assert row["distance_from_init"] > 1e-3
