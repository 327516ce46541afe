"""Every sharding of a model has the same rounding noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_noise as on_ranks
from world import run_world


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """What one rank reads without noise and with it."""
    found = {}
    for noise in ("null", "5"):
        folder = tmp_path_factory.mktemp(noise)
        overrides = [f"numerics.noise_seed={noise}"]
        (found[noise],) = run_world(on_ranks.load, overrides, str(folder), world_size=1, folder=folder)
    return found


@pytest.mark.parametrize(("strategy", "world_size"), [("full", 3), ("hybrid", 4)])
def test_noise_does_not_depend_on_the_sharding(
    strategy: str, world_size: int, alone: dict[str, tuple[str, Any]], tmp_path: Path
) -> None:
    overrides = [f"sharding={strategy}", "numerics.noise_seed=5"]
    ranks = run_world(on_ranks.load, overrides, str(tmp_path), world_size=world_size, folder=tmp_path)
    digest, embedding = alone["5"]
    assert len(embedding) % 3, "no equal shares for three ranks"
    assert digest != alone["null"][0]
    for found, whole in ranks:
        assert found == digest
        np.testing.assert_array_equal(whole, embedding)
