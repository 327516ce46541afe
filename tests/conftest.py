"""Keeps the tests from W&B's servers and from the variables of an outer launcher or of the user's own W&B.

The tests come in two tiers. The quick one, `pytest -m "not slow"`, is what in-process tests there are, small worlds of
2 and of 4 ranks, and a run of every entry (`cli/test_entries.py`, and the files of those entries that are quick by
themselves). What is marked `slow` trains in every variant, interrupts, resumes and compares; `.ci/run` runs both.
"""

import logging
import os
from collections.abc import Iterator

import pytest
import torch

OUTER_VARIABLES = ("WANDB_", "SLURM_", "MASTER_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD")


@pytest.fixture(autouse=True, scope="session")
def own_environment() -> None:
    """Forget what would make a test adopt an outer launch, or make `tracker.mode=auto` go online."""
    for name in [name for name in os.environ if name.startswith(OUTER_VARIABLES)]:
        del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait would take the cores from ranks that work
    torch.set_num_threads(1)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Put the root logger back as it was, for Hydra configures logging anew for every job of this process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
