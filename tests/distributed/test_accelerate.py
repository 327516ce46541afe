"""The page's lines keep the rotations out of Accelerate's FSDP2, and alike on all ranks with one process's gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ranks_accelerate import run_page
from world import run_world


def test_readmes_lines_leave_rotations_whole_and_average_their_gradients(tmp_path: Path) -> None:
    ranks = run_world(run_page, world_size=2, folder=tmp_path)
    for rank in ranks:
        assert rank["whole"] == {f"rotation_bank.{name}" for name in ("R1", "R2_0", "R2_1")}
        assert "model.layers.0.self_attn.q_proj.weight" in rank["split"]
        for name, expected in rank["expected"].items():
            np.testing.assert_allclose(rank["mean"][name], expected, rtol=1e-3, atol=1e-6)
    assert not np.array_equal(ranks[0]["own"]["R1"], ranks[1]["own"]["R1"])  # Accelerate reduced nothing
