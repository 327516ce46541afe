"""What a training step takes besides its arithmetic: `python -m benchmarks.overhead [override …]`.

Whole runs on gloo ranks, as `python -m rotexp.train` carries them out, with every figure taken in every step and clocks
around the parts of the loop. Forward, backward, consolidation of gradients, clip and optimizer count as arithmetic, and
data, metrics, digests of replicas, logging and whatever else lies between two steps as everything else.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import facts
from benchmarks.ranks import start_ranks
from benchmarks.timing import Spread, spread

TARGET = 0.02
ARITHMETIC = ("forward", "backward", "consolidate", "clip", "optimizer")
RUNS = {
    "rotations, full": ("sharding=full",),
    "all weights, no_shard": ("train.params=all",),
}
"""What is trained and how it is sharded: digests of the rotations alone, and of everything on every rank."""
DEFAULTS = ("model=random_llama", "model.size=135m", "data.sequence_length=256", "data.global_batch_size=2")
EVERY_STEP = ("metrics.divergence_every=1", "metrics.rotation_every=1", "train.log_every=1")
SHORT = ("tracker=jsonl", "evaluation.window=64", "evaluation.max_windows=2", "train.checkpoint_every=null")


@dataclass
class Clock:
    """Wall and processor seconds of this rank: when steps began, and what their parts took, by step."""

    began: list[Any] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a part of the present step; `data` begins one."""
        began = _now()
        if name == "data":
            self.began.append(began)
            self.parts.append({})
        yield
        if self.parts:
            self.parts[-1][name] = self.parts[-1].get(name, 0.0) + _now() - began

    def shares(self) -> dict[str, list[float]]:
        """Return shares of every step but the first and the last: of wall time, of processor time, of the digests."""
        periods = [after - before for before, after in pairwise(self.began)][1:-1]
        steps = self.parts[1 : 1 + len(periods)]
        rest = [period - sum(step[name] for name in ARITHMETIC) for period, step in zip(periods, steps, strict=True)]
        digests = [step["divergence"] for step in steps]
        return {
            "step_s": [float(period[0]) for period in periods],
            "wall": [float(other[0] / period[0]) for other, period in zip(rest, periods, strict=True)],
            "processor": [float(other[1] / period[1]) for other, period in zip(rest, periods, strict=True)],
            "digest": [float(digest[1] / period[1]) for digest, period in zip(digests, periods, strict=True)],
        }


def _now() -> Any:
    return np.array([time.perf_counter(), time.process_time()])


@contextmanager
def clocked() -> Iterator[Clock]:
    """Put clocks around the parts of the loop and around the digests."""
    from rotexp.training import loop, meter
    from rotexp.training.coordinator import Coordinator

    clock, divergence = Clock(), Coordinator.divergence

    def timed(coordinator: Coordinator, *, frozen: bool = False) -> Any:
        with clock.around("divergence"):
            return divergence(coordinator, frozen=frozen)

    with (
        mock.patch.object(loop, "part", clock.around),
        mock.patch.object(meter, "part", clock.around),
        mock.patch.object(Coordinator, "divergence", timed),
    ):
        yield clock


def run_rank(overrides: Sequence[str], folder: Path) -> None:
    """Train as the rank that the environment says this process is, and leave its shares in the folder."""
    from rotexp.experiment.inputs import open_inputs
    from rotexp.launch.rank import run_rank

    config = _compose([*SHORT, *EVERY_STEP, *overrides])
    with clocked() as clock:
        run_rank(config, open_inputs(config), folder)
    facts.write_json(folder / f"shares-{os.environ['RANK']}.json", clock.shares())


def measure(overrides: Sequence[str], *, ranks: int, threads: int) -> dict[str, Any]:
    """Train on that many ranks, without accumulation, and return what rank 0 found, with means and quartiles."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "benchmarks.overhead", "--rank-folder", place, *overrides]
        start_ranks(command, world_size=ranks, threads=threads)
        shares = facts.read_json(Path(place) / "shares-0.json")
    means = {name: {"mean": float(np.mean(values)), **_quartiles(values)} for name, values in shares.items()}
    return {"overrides": list(overrides), "ranks": ranks, "shares": shares, **means}


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    return dataclasses.asdict(spread(values))


def _compose(overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_module

    from rotexp.config.composition import to_config
    from rotexp.launch.command_line import register

    register()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        return to_config(compose("config", overrides))


def table(found: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures for people: means, and quartiles of steps."""
    columns = ("run", "ranks", "steps", "step (s)", "everything else (% of wall time)", "% of processor time")
    rows = [_cells(run) for run in found]
    return facts.make_table("Everything else in a step", (*columns, "digests (%)", "target (%)", "met"), rows)


def _cells(run: dict[str, Any]) -> list[str]:
    percents = [_percent(run[name]) for name in ("wall", "processor", "digest")]
    met = "yes" if run["wall"]["mean"] <= TARGET else "MISSED"
    steps = str(run["wall"]["count"])
    return [
        run["name"],
        str(run["ranks"]),
        steps,
        f"{run['step_s']['mean']:.2f}",
        *percents,
        f"{100 * TARGET:.0f}",
        met,
    ]


def _percent(found: dict[str, float]) -> str:
    lower, median, upper = (100 * found[name] for name in ("lower", "median", "upper"))
    return f"{100 * found['mean']:.2f}; {Spread(median, lower, upper, int(found['count'])).text()}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the figures."""
    parser = facts.parser(__doc__, output="overhead.json", repetitions=20)
    parser.add_argument("--quant", default="w16a4")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--rank-folder", type=Path, help="be a rank, and leave its figures there")
    parser.epilog = f"Further arguments are overrides in place of: {' '.join(DEFAULTS)}"
    options, overrides = parser.parse_known_args(arguments)
    if options.rank_folder is not None:
        run_rank(overrides, options.rank_folder)
        os._exit(0)  # as `benchmarks.ranks` does, and for its reason
    steps = f"train.steps={options.repetitions + 2}"
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.ranks)
    found = []
    for name in options.runs:
        chosen = [*(overrides or DEFAULTS), *RUNS[name], f"quant={options.quant}", steps, f"launch.threads={threads}"]
        found.append({"name": name, **measure(chosen, ranks=options.ranks, threads=threads)})
    facts.report(options.output, [table(found)], {"overhead": found})


if __name__ == "__main__":
    main()
