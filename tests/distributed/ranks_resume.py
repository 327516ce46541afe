"""What the ranks of a test do: whole experiments that begin at checkpoints, or meet numbers that are not finite."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from ranks_experiment import compose

NUM_BLOCKS = 37
"""Calibration blocks; of 37, an epoch of global batches of 8 has 32, which are 4 steps."""

SMALL = [
    "model=random_llama",
    "data.sequence_length=16",
    "evaluation.window=16",
    "launch.threads=1",
    "metrics.rotation_every=1",
    "tracker=jsonl",
]


@dataclass(frozen=True)
class Job:
    """A run: what it is given beside `SMALL`, its checkpoint, the fault it meets, whether its loss draws numbers."""

    overrides: tuple[str, ...]
    checkpoint: str | None = None
    fault: str = ""
    draws: bool = False


def run_jobs(jobs: dict[str, Job], folder: str) -> dict[str, dict[str, Any]]:
    """Run each job in a folder of its name; return what this rank saw."""
    from rotexp.experiment.inputs import open_inputs

    inputs = open_inputs(compose([*SMALL]))  # text and model are the same in every job
    inputs = replace(inputs, calibration=inputs.calibration[:NUM_BLOCKS])
    return {name: _run(job, inputs, Path(folder) / name) for name, job in jobs.items()}


def _run(job: Job, inputs: Any, folder: Path) -> dict[str, Any]:
    import torch
    from rich.console import Console

    from rotexp.experiment import context as contexts
    from rotexp.experiment.beginning import Beginning
    from rotexp.experiment.experiment import run_experiment
    from rotexp.launch.rank import open_accelerator
    from rotexp.training.saved_state import Checkpoints

    config = compose([*SMALL, *job.overrides])
    accelerator = open_accelerator(config)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(accelerator.process_index)  # on purpose different: nothing may depend on it
    if job.checkpoint is not None:
        inputs = replace(inputs, beginning=Beginning(Path(job.checkpoint)))
    seen: dict[str, Any] = {"blocks": [], "drawn": {}, "loaded": None, "error": None}
    with mock.patch.object(Checkpoints, "save", _drawing(Checkpoints.save, seen)), _recorded_blocks(seen["blocks"]):
        output = StringIO()
        with mock.patch.object(contexts, "Console", return_value=Console(file=output, width=1000)):
            context = contexts.open_context(config, inputs, folder, accelerator=accelerator)
        taken_over = context.taken_over
        taken_over.load = _gathering(taken_over.load, seen)  # type: ignore[method-assign]
        faulty = _fault(job.fault, rank=accelerator.process_index)
        with faulty, _drawing_loss() if job.draws else nullcontext():
            try:
                run_experiment(context)
            except Exception as error:
                seen["error"] = str(error)
    accelerator.wait_for_everyone()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return seen | {"output": output.getvalue()}


def _drawing(save: Any, seen: dict[str, Any]) -> Any:
    """Return `save`, which draws a random number after each checkpoint, as a step that needs some would."""
    import torch

    def saved(self: Any, step: int, *arguments: Any, **options: Any) -> Any:
        path = save(self, step, *arguments, **options)
        seen["drawn"][step] = torch.rand(()).item()
        return path

    return saved


def _gathering(load: Any, seen: dict[str, Any]) -> Any:
    """Return `load`, which keeps the whole of the state it loaded, and the random number that is next."""
    import torch

    from rotexp.sharding.state_dicts import full_state

    def loaded(state: Any, *, base: str, communication: Any) -> Any:
        notes = load(state, base=base, communication=communication)
        full = full_state(state.tensors(), communication=communication)
        seen["loaded"] = {name: tensor.contiguous().numpy() for name, tensor in full.items()}
        weights = dict(state.model.network.named_parameters())
        names = state.master.layout.shapes if state.master else ()
        seen["compute_weights"] = {name: weights[name].detach().float().numpy().copy() for name in names}
        seen["notes"] = notes
        seen["next"] = torch.rand(()).item()
        return notes

    return loaded


@contextmanager
def _recorded_blocks(blocks: list[int]) -> Iterator[None]:
    from rotexp.data.blocks import BlockDataset

    read = BlockDataset.__getitem__

    def recorded(self: Any, index: int) -> Any:
        blocks.append(index)
        return read(self, index)

    with mock.patch.object(BlockDataset, "__getitem__", recorded):
        yield


@contextmanager
def _fault(kind: str, *, rank: int) -> Iterator[None]:
    """Spoil the second step on rank 1 alone: its loss, or the gradient of the parameter that is named."""
    from rotexp.training.objectives import CrossEntropy

    objective, calls = CrossEntropy.__call__, 0

    def spoiled(self: Any, model: Any, token_ids: Any, *, teacher: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = objective(self, model, token_ids, teacher=teacher)
        if rank != 1 or calls != 2 or not kind:
            return loss
        if kind == "loss":
            return loss * math.nan
        handle = model.network.get_parameter(kind).register_hook(lambda gradient: _once(gradient, handle))
        return loss

    with mock.patch.object(CrossEntropy, "__call__", spoiled):
        yield


@contextmanager
def _drawing_loss() -> Iterator[None]:
    """Let the loss depend on the next number of torch's, NumPy's and Python's own random stream, as a dropout would."""
    import torch

    from rotexp.training.objectives import CrossEntropy

    objective = CrossEntropy.__call__

    def drawing(self: Any, model: Any, token_ids: Any, *, teacher: Any) -> Any:
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        return objective(self, model, token_ids, teacher=teacher) * (1.0 + drawn)

    with mock.patch.object(CrossEntropy, "__call__", drawing):
        yield


def _once(gradient: Any, handle: Any) -> Any:
    handle.remove()
    spoiled = gradient.clone()
    spoiled.view(-1)[3] = math.inf
    return spoiled


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """Read a checkpoint by torch alone, every tensor whole."""
    import warnings

    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    whole = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(whole, storage_reader=FileSystemReader(path), no_dist=True)
    return {name: tensor.numpy() for name, tensor in whole.items()}
