"""What a run made, by digests of its bits; and what the ranks of the tests of exact numerics do to make it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from ranks_experiment import run_experiments
from ranks_resume import read_checkpoint
from safetensors.numpy import load_file

COMPUTED = ("train/loss", "train/lr", "train/tokens", "train/num_skipped", "grad_norm/", "rotation/", "replica/")
"""Figures of a step that follow from the request; the others are measured, or count what ranks said to each other."""

CONCLUDED = ("steps", "loss_start", "loss_end", "best_step", "best_by", "improved")

Made = dict[str, Any]
"""Numbers, and digests of tensors, by names in the order of a run's life."""


def made(folder: Path) -> Made:
    """Read all that is in a run's folder and follows from the request: steps, checkpoints, files, held-out figures."""
    found: Made = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        figures = {key: value for key, value in row.items() if key.startswith((*COMPUTED, "eval/loss"))}
        found |= {f"step {row['step']}: {key}": value for key, value in figures.items()}
    for path in sorted((folder / "checkpoints").glob("step-*")):
        found |= {f"checkpoint {path.name}: {key}": digest(values) for key, values in read_checkpoint(path).items()}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {f"{file.name}: {key}": digest(values) for key, values in load_file(file).items()}
    summary = json.loads((folder / "summary.json").read_text())
    concluded = {key: summary["train"][key] for key in CONCLUDED}
    groups = {"evaluation": summary["evaluation"], "train": concluded, "rotation": summary["rotation"]}
    return found | {f"{group}: {key}": value for group, values in groups.items() for key, value in values.items()}


def digest(values: np.ndarray) -> str:
    """Return what tells any two tensors apart that differ in dtype, shape or a bit."""
    described = f"{values.dtype} {values.shape} ".encode()
    return hashlib.sha256(described + values.tobytes()).hexdigest()[:16]


def run_digested(cases: dict[str, list[str]], folder: str) -> dict[str, Made]:
    """Run each case as `run_experiments` does; return what it made, and on this rank its rotations after each step."""
    runs = run_experiments(cases, folder)
    return {name: _of_steps(run) | made(Path(folder) / name) for name, run in runs.items()}


def _of_steps(run: dict[str, Any]) -> Made:
    """Digest the rotations that each step left."""
    steps = [row["step"] for row in run["rows"]]
    return {
        f"step {step}: {name}": digest(matrix)
        for step, rotations in zip(steps, run["stepped"], strict=True)
        for name, matrix in rotations.items()
    }


def differing(found: Made, expected: Made) -> list[str]:
    """Return the first few names by which two runs differ, with both values."""
    names = [*expected, *(name for name in found if name not in expected)]
    parted = [name for name in names if name not in found or name not in expected or found[name] != expected[name]]
    return [f"{name}: {found.get(name)} and {expected.get(name)}" for name in parted[:8]]
