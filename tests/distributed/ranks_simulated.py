"""What the ranks of the tests of a simulated world do: train, and weigh, count and note all that their rank does."""

from __future__ import annotations

import dataclasses
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ranks_experiment import compose
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.trained_memory import LOOKS, PAUSE_SECONDS
from rotexp.experiment import experiment, training_phase
from rotexp.experiment.context import Context, Record, open_context
from rotexp.experiment.inputs import open_inputs
from rotexp.launch.rank import open_accelerator

PEAK = 1e9
"""Operations a second that the device of a rank is taken to have, since CPUs have no known peak."""


class LiveTensors(TorchDispatchMode):
    """Adds up the storages of all tensors that operations take or give, each once and as long as anything has it.

    Autograd's saved tensors are in it, since a storage's Python object lives as long as the storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    def settled(self) -> int:
        """Return what is live without what gloo's threads are about to let go, as they do with what they have sent."""
        looks = []
        for _ in range(LOOKS):
            looks.append(self.now)
            time.sleep(PAUSE_SECONDS)
        return min(looks)

    def _hold(self, storage: Any) -> None:
        key = id(storage)
        if key not in self.held:
            self.held.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self.held.remove(key)
        self.now -= size


FIND_UTILIZATION, TRAIN_MODEL = training_phase.find_utilization, experiment.train_model


def with_a_peak(context: Context, model: Any) -> Any:
    """Return the utilization that a run finds, with a peak."""
    found = FIND_UTILIZATION(context, model)
    assert found.peak is None
    return dataclasses.replace(found, peak=PEAK)


class Watch:
    """Watches the training of one run from its first tensor to its last.

    Attributes:
        found: what it fed to the network, the peak of live bytes, and after each step what was live and counted.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"token_ids": [], "steps": []}

    def train_model(self, context: Context, model: Any, sharded: Any) -> Any:
        """Train, and keep what was found."""
        live, flops = LiveTensors(), FlopCounterMode(display=False)
        log = Record.log

        def note(_network: nn.Module, arguments: tuple[Tensor, ...], _named: Any) -> None:
            self.found["token_ids"].append(arguments[0].tolist())

        def log_watched(record: Record, row: dict[str, float]) -> None:
            self.found["steps"].append({"live": live.settled(), "flops": flops.get_total_flops(), **row})
            log(record, row)

        watch = model.network.register_forward_pre_hook(note, with_kwargs=True)
        with mock.patch.object(Record, "log", log_watched), flops, live:
            trained = TRAIN_MODEL(context, model, sharded)
        watch.remove()
        self.found["peak"] = live.peak
        return trained


def train_watched(cases: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """Run each case's experiment, and return what its training did on this rank."""
    inputs = open_inputs(compose(next(iter(cases.values()))))
    return {name: _train(overrides, inputs, Path(folder) / name) for name, overrides in cases.items()}


def _train(overrides: list[str], inputs: Any, folder: Path) -> dict[str, Any]:
    config = compose(overrides)
    accelerator = open_accelerator(config)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    context, watch = open_context(config, inputs, folder, accelerator=accelerator), Watch()
    with (
        mock.patch.object(training_phase, "find_utilization", with_a_peak),
        mock.patch.object(experiment, "train_model", watch.train_model),
    ):
        experiment.run_experiment(context)
    accelerator.wait_for_everyone()
    return {**watch.found, "summary": context.record.summary}
