"""Parts of `summary.json`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from rotexp.training.state import TrainResult

PACKAGES = ("rotexp", "torch", "transformers", "accelerate", "hydra-core", "wandb", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a run's figures."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def train_summary(result: TrainResult, evaluation: Mapping[str, Any], *, world_size: int) -> dict[str, Any]:
    """Return what training did; losses in nats; for `best_step` and `best_by` see `rotexp.training.best.Choice`.

    `improved` compares held-out perplexity with that before training: under the rotations of the start, random Hadamard
    ones as a rule, or under none. It is null where nothing was trained.
    """
    losses = result.losses
    before = next((evaluation[row] for row in ("start", "hadamard", "quantized") if row in evaluation), None)
    improved = None
    if losses and before is not None:
        improved = evaluation["trained"]["perplexity"] < before["perplexity"]
    return {
        "steps": len(losses),
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        "best_step": result.best.step if result.best else None,
        "best_by": result.best.by if result.best else None,
        "improved": improved,
        "skipped": result.skipped,
        "seconds": result.seconds,
        "device_hours": world_size * result.seconds / 3600.0,
    }
