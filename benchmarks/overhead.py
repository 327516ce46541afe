"""What a training step takes besides its arithmetic: `python -m benchmarks.overhead [override …]`.

Whole runs on gloo ranks, as `python -m rotexp.train` carries them out, with every figure taken in every step and clocks
around the parts of the loop. Forward, backward, consolidation of gradients, clip and optimizer count as arithmetic, and
data, metrics, digests of replicas, logging and whatever else lies between two steps as everything else. Figures are of
rank 0, which does most; its processor time includes W&B's process, which takes as much a second whatever a step does.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil

from benchmarks import facts
from benchmarks.ranks import start_ranks
from benchmarks.timing import Spread, spread

TARGET = 0.02
ARITHMETIC = ("forward", "backward", "consolidate", "clip", "optimizer")
PIECES = ("data", "digests", "drift", "memory", "metrics.jsonl", "mirror", "console")
PROCESSES = "W&B's process"
REST = "rest"
"""Of everything else what is in no piece: the mirror's thread, the loop itself, and what lies between its parts."""
RUNS = {
    "rotations, full": ("sharding=full",),
    "all weights, no_shard": ("train.params=all",),
}
"""What is trained and how it is sharded: digests of the rotations alone, and of everything on every rank."""
TRACKERS = {"jsonl": ("tracker=jsonl",), "wandb": ("tracker=wandb", "tracker.mode=offline")}
DEFAULTS = ("model=random_llama", "model.size=135m", "data.sequence_length=256")
EVERY_STEP = ("metrics.divergence_every=1", "metrics.rotation_every=1", "train.log_every=1")
SHORT = ("evaluation.window=64", "evaluation.max_windows=1", "train.checkpoint_every=null")


@dataclass
class Clock:
    """Wall and processor seconds of this rank, and its children's processor seconds: at beginnings and of parts."""

    began: list[Any] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a part of the present step; `data` begins one."""
        if name == "data":
            self.began.append(np.array([*_now(), _children()]))
            self.parts.append({})
        began = _now()
        yield
        if self.parts:
            self.parts[-1][name] = self.parts[-1].get(name, 0.0) + _now() - began

    def figures(self) -> dict[str, list[float]]:
        """Return of every step but the first and the last its seconds, its shares, and milliseconds of every piece."""
        periods = np.diff(self.began, axis=0)[1:-1]
        steps = self.parts[1 : 1 + len(periods)]
        whole = np.stack([periods[:, 0], periods[:, 1] + periods[:, 2]], axis=1)
        other = whole - np.sum([[step[name] for name in ARITHMETIC] for step in steps], axis=1)
        pieces = {name: np.array([step.get(name, np.zeros(2))[1] for step in steps]) for name in PIECES}
        pieces[PROCESSES] = periods[:, 2]
        pieces[REST] = other[:, 1] - sum(pieces.values())
        found = {"step_s": whole[:, 0], "processor_s": whole[:, 1], "wall": (other / whole)[:, 0]}
        found |= {"processor": (other / whole)[:, 1], **{name: 1000 * part for name, part in pieces.items()}}
        return {name: figures.tolist() for name, figures in found.items()}


def _now() -> Any:
    return np.array([time.perf_counter(), time.process_time()])


def _children() -> float:
    """Return the processor seconds of this process's children, to a hundredth."""
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return float(sum(each.user + each.system for each in times))


@contextmanager
def clocked() -> Iterator[Clock]:
    """Put clocks around the parts of the loop and around the pieces of everything else."""
    from rotexp.runfolder.records import MetricsFile
    from rotexp.tracking.console import TrainingProgress
    from rotexp.tracking.phases import Phases
    from rotexp.tracking.recording import Mirror
    from rotexp.training import loop, meter
    from rotexp.training.coordinator import Coordinator

    clock = Clock()
    places: list[tuple[Any, str, str]] = [
        (Coordinator, "divergence", "digests"),
        (meter, "rotation_metrics", "drift"),
        (Phases, "spread", "memory"),
        (MetricsFile, "log", "metrics.jsonl"),
        (Mirror, "log", "mirror"),
        (TrainingProgress, "show", "console"),
    ]
    with ExitStack() as patches:
        for module in (loop, meter):
            patches.enter_context(mock.patch.object(module, "part", clock.around))
        for owner, name, piece in places:
            patches.enter_context(mock.patch.object(owner, name, _timed(clock, piece, getattr(owner, name))))
        yield clock


def _timed(clock: Clock, piece: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        with clock.around(piece):
            return call(*arguments, **options)

    return timed


def run_rank(overrides: Sequence[str], folder: Path) -> None:
    """Train as the rank that the environment says this process is, and leave its figures in the folder."""
    from rotexp.experiment.inputs import open_inputs
    from rotexp.launch.rank import run_rank

    config = _compose([*SHORT, *EVERY_STEP, *overrides])
    with clocked() as clock:
        run_rank(config, open_inputs(config), folder)
    facts.write_json(folder / f"figures-{os.environ['RANK']}.json", clock.figures())


def measure(overrides: Sequence[str], *, ranks: int, threads: int) -> dict[str, Any]:
    """Train on that many ranks, without accumulation, and return rank 0's figures, with means and quartiles."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "benchmarks.overhead", "--rank-folder", place, *overrides]
        start_ranks(command, world_size=ranks, threads=threads)
        steps = facts.read_json(Path(place) / "figures-0.json")
    means = {name: {"mean": float(np.mean(values)), **_quartiles(values)} for name, values in steps.items()}
    return {"overrides": list(overrides), "ranks": ranks, "steps": steps, **means}


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    return dataclasses.asdict(spread(values))


def _compose(overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    from rotexp.config.composition import to_config
    from rotexp.launch.command_line import register

    register()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        return to_config(compose("config", overrides))


def tables(found: Sequence[dict[str, Any]]) -> list[facts.Table]:
    """Return the figures for people: means, and quartiles of steps; and what everything else is made of."""
    shares = ("steps", "step (s)", "everything else (% of wall time)", "% of processor time", "target (%)", "met")
    first = ("run", "tracker", "ranks")
    pieces = ("step (s)", *PIECES, PROCESSES, REST)
    return [
        facts.make_table("Everything else in a step", (*first, *shares), [_shares(run) for run in found]),
        facts.make_table("It in ms of processor time, means", (*first, *pieces), [_pieces(run) for run in found]),
    ]


def _shares(run: dict[str, Any]) -> list[str]:
    met = "yes" if run["wall"]["mean"] <= TARGET else "MISSED"
    figures = (f"{run['step_s']['mean']:.2f}", _percent(run["wall"]), _percent(run["processor"]))
    return [*_names(run), str(run["wall"]["count"]), *figures, f"{100 * TARGET:.0f}", met]


def _names(run: dict[str, Any]) -> list[str]:
    return [run["name"], run["tracker"], str(run["ranks"])]


def _pieces(run: dict[str, Any]) -> list[str]:
    milliseconds = [f"{run[name]['mean']:.1f}" for name in (*PIECES, PROCESSES, REST)]
    return [*_names(run), f"{run['processor_s']['mean']:.2f}", *milliseconds]


def _percent(found: dict[str, float]) -> str:
    lower, median, upper = (100 * found[name] for name in ("lower", "median", "upper"))
    return f"{100 * found['mean']:.2f}; {Spread(median, lower, upper, int(found['count'])).text()}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the figures."""
    parser = facts.parser(__doc__, output="overhead.json", repetitions=5)
    parser.add_argument("--quant", default="w16a4")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="worlds; each rank has one block a step")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--trackers", nargs="+", default=list(TRACKERS), choices=list(TRACKERS))
    parser.add_argument("--rank-folder", type=Path, help="be a rank, and leave its figures there")
    parser.epilog = f"Further arguments are overrides in place of: {' '.join(DEFAULTS)}"
    options, overrides = parser.parse_known_args(arguments)
    if options.rank_folder is not None:
        run_rank(overrides, options.rank_folder)
        os._exit(0)  # as `benchmarks.ranks` does, and for its reason
    found = []
    for ranks, name, tracker in product(options.ranks, options.runs, options.trackers):
        threads = options.threads or max(1, (os.cpu_count() or 1) // ranks)
        steps = f"train.steps={options.repetitions + 2}"
        sizes = (steps, f"data.global_batch_size={ranks}", f"launch.threads={threads}", f"quant={options.quant}")
        chosen = [*RUNS[name], *TRACKERS[tracker], *sizes, *(overrides or DEFAULTS)]
        found.append({"name": name, "tracker": tracker, **measure(chosen, ranks=ranks, threads=threads)})
    facts.report(options.output, tables(found), {"overhead": found})


if __name__ == "__main__":
    main()
