"""How far runs drift apart: what is compared, and that noise alone parts runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import drift, facts
from benchmarks.all import TINY_RUN


def drifter(shift: float, *, perplexity: float = 8.0) -> drift.Drifter:
    """A run of three steps, which is so far from others at each."""
    return drift.Drifter(
        losses=[4.0, 3.0 + shift, 2.0 - shift],
        grad_norms=[1.0, 1.0, 1.0 + 2 * shift],
        rotations=[{"R1": torch.eye(2), "R2_0": torch.full((2, 2), step * shift)} for step in range(3)],
        evaluation={"trained": {"perplexity": perplexity, "kl": 0.5 + shift}},
    )


def test_steps_are_compared_over_all_runs_and_rotations() -> None:
    first, second, third = drift.steps_apart([drifter(0.0), drifter(0.25), drifter(-0.5)])
    assert (first["step"], first["loss"], first["loss_range"], first["rotation_range"]) == (1, 4.0, 0.0, 0.0)
    assert (second["loss"], second["loss_range"], second["rotation_range"]) == (3.0, 0.75, 0.75)
    assert (third["loss_range"], third["grad_norm_range"], third["rotation_range"]) == (0.75, 1.5, 1.5)


def test_rows_have_range_and_deviation() -> None:
    (row,) = drift.rows_apart([drifter(0.0), drifter(0.0, perplexity=9.0), drifter(0.25, perplexity=10.0)])
    assert row["row"] == "trained"
    assert row["perplexity"] == {"value": 8.0, "range": 2.0, "deviation": 1.0}
    assert row["kl"] == pytest.approx({"value": 0.5, "range": 0.25, "deviation": 0.25 / math.sqrt(3)})
    assert "| trained | 8.00 " in facts.markdown(drift.rows_table([row]))


def test_powers_of_two_and_the_last_step_are_shown() -> None:
    steps = [{"step": n, "loss_range": 0.0, "grad_norm_range": 0.0, "rotation_range": 0.0} for n in range(1, 21)]
    table = drift.steps_table(steps, runs=2)
    assert [row[0] for row in table["rows"]] == ["1", "2", "4", "8", "16", "20"]


def test_runs_with_noise_drift_from_that_without(tmp_path: Path) -> None:
    output = tmp_path / "drift.json"
    drift.main(["--seeds", "1", "--steps", "2", "--threads", "1", "--output", str(output), *TINY_RUN.split()])
    found = facts.read_json(output)["figures"]
    assert [step["step"] for step in found["drift"]] == [1, 2]
    for step in found["drift"]:
        assert 0.0 < step["rotation_range"] < 0.5
    assert found["drift"][0]["loss_range"] < 0.01
    assert {"float", "quantized", "hadamard", "trained"} <= {row["row"] for row in found["evaluation"]}
    with pytest.raises(RuntimeError, match=r"numerics\.noise_seed=null.*quantum"):
        drift.main(["--seeds", "1", "--steps", "2", "quantum=1"])
