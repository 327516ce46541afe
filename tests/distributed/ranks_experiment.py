"""What the ranks of a test do: whole experiments, one after another in one process group."""

from __future__ import annotations

import ast
import json
import sys
import typing
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

TEXT = ["data=text", f"data.calibration={typing.__file__}", f"data.evaluation={ast.__file__}"]
"""Of every rank by itself: two modules of the standard library are read far sooner than all of its prose."""

SMALL = [
    *TEXT,
    "data.sequence_length=32",
    "data.global_batch_size=8",
    "evaluation.window=32",
    "evaluation.max_windows=2",
    "train.steps=3",
    "tracker=jsonl",
]


def compose(overrides: list[str]) -> Any:
    """Return the configuration that the command line would give."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from rotexp.config.composition import to_config
    from rotexp.config.plugins import typed_plugins
    from rotexp.launch.command_line import register

    register()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        return to_config(hydra_compose("config", [*SMALL, *overrides]), typed=typed_plugins(overrides))


def run_experiments(cases: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """Run each case's experiment, and return its training rows, rotations (of each step too), summary, divergence.

    A case with `resume=DIR` begins at the newest checkpoint of that run.
    """
    import torch

    from rotexp.experiment.inputs import open_inputs

    threads = torch.get_num_threads()  # of this rank alone; a run would give every rank as many
    inputs = open_inputs(compose(next(iter(cases.values()))))  # text and model are the same in every case
    return {name: _run(overrides, inputs, Path(folder) / name, threads=threads) for name, overrides in cases.items()}


def run_with_parts(cases: dict[str, list[str]], folder: str, parts: str) -> dict[str, Any]:
    """Run each case as `run_experiments` does, where the folder `parts` holds a plug-in."""
    sys.path.insert(0, parts)
    return run_experiments(cases, folder)


def run_with_unequal_threads(cases: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """Run each case as `run_experiments` does, but let every rank step by its own number of threads."""
    from rotexp.sharding.communication import Communication

    with mock.patch.object(Communication, "equal_threads", return_value=nullcontext()):
        return run_experiments(cases, folder)


def _run(overrides: list[str], inputs: Any, folder: Path, *, threads: int) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    from rotexp.experiment.beginning import Beginning
    from rotexp.experiment.context import open_context
    from rotexp.experiment.experiment import run_experiment
    from rotexp.launch.rank import open_accelerator
    from rotexp.runfolder.checkpoint_folders import find_checkpoint
    from rotexp.training.state import TrainingState

    config = compose(overrides)
    if config.resume != "auto":
        inputs = replace(inputs, beginning=Beginning(find_checkpoint(Path(config.resume)).path))
    accelerator = open_accelerator(config)
    rank = accelerator.process_index
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(rank)  # on purpose different: nothing may depend on it
    torch.set_num_threads(threads)
    context = open_context(config, inputs, folder, accelerator=accelerator)
    stepped: list[dict[str, Any]] = []
    with mock.patch.object(TrainingState, "advance", _recording(TrainingState.advance, stepped)):
        run_experiment(context)
    accelerator.wait_for_everyone()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "rows": [row for row in map(json.loads, lines) if "train/loss" in row],
        "rotations": {name: matrix.numpy() for name, matrix in load_file(folder / "rotations.safetensors").items()},
        "stepped": stepped,
        "summary": json.loads(json.dumps(context.record.summary)),
        "threads": torch.get_num_threads(),
        "divergence": context.record.summary["replica"]["max_abs_diff"],
    }


def _recording(advance: Any, stepped: list[dict[str, Any]]) -> Any:
    """Return `advance`, which keeps the rotations that it leaves."""

    def recorded(self: Any, loss: float) -> None:
        advance(self, loss)
        stepped.append({name: matrix.numpy() for name, matrix in self.model.bank.snapshot().items()})

    return recorded
