"""Keeps the tests from W&B's servers and from the variables of an outer launcher or of the user's own W&B."""

import os

import pytest

OUTER_VARIABLES = ("WANDB_", "SLURM_", "MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD")


@pytest.fixture(autouse=True, scope="session")
def own_environment() -> None:
    """Forget what would make a test adopt an outer launch, or make `tracker.mode=auto` go online."""
    for name in [name for name in os.environ if name.startswith(OUTER_VARIABLES)]:
        del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
