"""What every phase of a run is given: the request, the ranks, where people and trackers hear of it, what is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console, RenderableType

from rotexp.config.composition import to_plain
from rotexp.config.schema import Config
from rotexp.experiment.inputs import Inputs
from rotexp.experiment.measurements import Measurements
from rotexp.experiment.taking_over import TakenOver
from rotexp.process.signals import StopRequest
from rotexp.runfolder.records import truncate_metrics
from rotexp.sharding.applying import precision_policy
from rotexp.sharding.communication import Communication
from rotexp.tracking.console import TrainingProgress
from rotexp.tracking.phases import Phases
from rotexp.tracking.recording import Trackers, open_trackers
from rotexp.tracking.tracker import TrackedRun

PHASES = ("load", "shard", "baseline", "prepare", "hadamard", "train", "average", "save", "merge", "evaluate")
"""The phases of a run, in their order; `average` is left out where no average is kept."""


class Messages:
    """What a run tells people; only the first rank does."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, drawn: RenderableType) -> None:
        """Print a table or a panel."""
        self._console.print(drawn)

    def say(self, text: str) -> None:
        """Tell people of something they may want to know."""
        self._say(text)

    def warn(self, text: str) -> None:
        """Tell people of something they may not expect."""
        self._say(f"warning: {text}", style="yellow")

    def _say(self, text: str, *, style: str | None = None) -> None:
        """Print a line as it is: names of folders may look like rich's markup."""
        self._console.print(text, style=style, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Record:
    """What trackers are told: metrics at the present step, and how the run ended.

    Attributes:
        step: the last that was done.
        summary: the end state, as far as phases have said what they came to.
    """

    def __init__(self, trackers: Trackers, *, step: int, simulated_world: int | None) -> None:
        self.step = step
        self.summary: dict[str, Any] = {"status": "running", "error": None}
        self._trackers = trackers
        self._mark = {} if simulated_world is None else {"sharding/sim_world": float(simulated_world)}

    @property
    def run_ids(self) -> dict[str, str]:
        """What trackers call the run, by the name of each that says so."""
        return self._trackers.run_ids

    def log(self, row: dict[str, float]) -> None:
        """Record metrics at the present step."""
        self._trackers.log(row | self._mark, step=self.step)

    def finish(self, facts: dict[str, Any]) -> None:
        """Complete the end state, and let the trackers end the run with it."""
        self.summary |= facts
        self._trackers.finish(self.summary, exit_code=0)

    @contextmanager
    def closed_if_failed(self) -> Iterator[None]:
        """Let the trackers say how the run ended, if the block fails or is interrupted."""
        try:
            yield
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._trackers.finish(self.summary | {"status": status, "error": str(error)}, exit_code=1)
            raise


@dataclass(frozen=True)
class Context:
    """One run on one rank.

    Attributes:
        ranks_per_node: how many ranks share this node, where the launcher says so.
        stop: what takes the signals that end a run.
        taken_over: where the run begins, and what it takes over from a checkpoint.
        measurements: the held-out figures.
    """

    config: Config
    inputs: Inputs
    folder: Path
    accelerator: Accelerator
    communication: Communication
    ranks_per_node: int | None
    stop: StopRequest
    taken_over: TakenOver
    messages: Messages
    progress: TrainingProgress
    record: Record
    phases: Phases
    measurements: Measurements

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        device: torch.device = self.accelerator.device
        return device


def open_context(
    config: Config, inputs: Inputs, folder: Path, *, accelerator: Accelerator, stop: StopRequest | None = None
) -> Context:
    """Open what a run on this rank needs beside its inputs: what it takes over, its trackers, its measurements.

    Args:
        stop: what takes the signals that end a run (None: nothing does).

    Raises:
        ValueError: the checkpoint at which it begins is not that of a run.
    """
    device, rank = accelerator.device, accelerator.process_index
    threads = 1 if config.numerics.exact else None  # whatever this and other worlds have
    communication = Communication(rank=rank, world_size=accelerator.num_processes, device=device, threads=threads)
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None
    console = Console(quiet=not accelerator.is_main_process)
    messages = Messages(console)
    taken_over = TakenOver(inputs.beginning, config, protocol=inputs.protocol)
    record = _open_record(config, folder, taken_over, rank=rank)
    progress = TrainingProgress(console, steps=config.train.steps, done=taken_over.step, phases=PHASES)
    common: dict[str, Any] = {"communication": communication, "device": device, "log": record.log}
    known = taken_over.evaluation
    return Context(
        config=config,
        inputs=inputs,
        folder=folder,
        accelerator=accelerator,
        communication=communication,
        ranks_per_node=ranks_per_node,
        stop=stop or StopRequest(),
        taken_over=taken_over,
        messages=messages,
        progress=progress,
        record=record,
        phases=Phases(**common, begin=progress.phase, before=taken_over.phases),
        measurements=Measurements(
            config, inputs, **common, ranks_per_node=ranks_per_node, known=known, say=messages.say
        ),
    )


def _open_record(config: Config, folder: Path, taken_over: TakenOver, *, rank: int) -> Record:
    """Open the trackers, on the first rank, after dropping what was recorded past the step the run begins after."""
    logged_to = truncate_metrics(folder, taken_over.step) if rank == 0 else -1
    run = TrackedRun(folder, to_plain(config), step=taken_over.step, logged_to=logged_to)
    trackers = open_trackers(config.tracker, run, rank=rank, run_ids=taken_over.run_ids)
    return Record(trackers, step=taken_over.step, simulated_world=config.sharding.sim_world)


def compute_dtype(config: Config) -> torch.dtype:
    """Return what a run's model computes in."""
    held: torch.dtype = getattr(torch, config.model.dtype.name)
    return precision_policy(config.sharding).param_dtype or held
