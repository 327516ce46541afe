"""What `numerics=exact` costs over fast, on one rank and on several: `python -m benchmarks.numerics`.

The loop of `python -m rotexp.train` trains one model, some steps under one and some under the other in turn, on
micro-batches of the same size; searches of clip ratios count as often as they come by default.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import facts
from benchmarks.collectives import CollectiveCounter, Collectives
from benchmarks.ranks import start_ranks
from benchmarks.step import REFRESH_EVERY
from benchmarks.timing import Spread, interleave, paired_ratios

MODES = ("fast", "exact")
TARGETS = {1: 1.10, 4: 1.25}
"""The largest ratio of exact to fast, in time, by ranks."""

MODELS = {
    "tiny": ("model=tiny",),
    "135m": ("model=random_llama", "model.size=135m"),
    "nano": ("model=random_llama", "model.size=nano"),
}
NEVER = 10**9
OTHERS = (
    "train.lr_schedule=constant",
    "evaluation.window=64",
    "evaluation.max_windows=1",
    f"metrics.divergence_every={NEVER}",
    f"metrics.rotation_every={NEVER}",
    "tracker=jsonl",
)
"""Every step is at one rate, nothing is evaluated, and only last steps, which do not count, compare replicas."""

FIRST, SEARCHING, LAST = 1, 1, 1
"""Steps of a stretch beside the plain ones: what begins the stretch, what searches clip ratios, what ends it."""

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Stamp:
    """The end of a step: seconds on the clock and of this process's threads, and collectives so far, if counted."""

    wall: float
    processor: float
    seen: Collectives


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Some steps of one mode after another, in the run of a context."""

    context: Any
    state: Any
    plain_steps: int

    def train(self, mode: str, counter: CollectiveCounter | None = None) -> list[Stamp]:
        """Make the steps, and return the end of each."""
        from rotexp.training.loop import Hooks, train
        from rotexp.training.options import Numerics

        context, state, stamps = self.context, self.state, list[Stamp]()

        def log(_step: int, _row: dict[str, float]) -> None:
            stamps.append(_now(counter))
            if len(stamps) == FIRST:
                state.model.refresh_quantizers()

        config = context.config
        steps = state.step + FIRST + SEARCHING + self.plain_steps + LAST
        config = dataclasses.replace(
            config,
            numerics=dataclasses.replace(config.numerics, mode=Numerics[mode]),
            train=dataclasses.replace(config.train, steps=steps, log_every=1, checkpoint_every=None),
            quant=dataclasses.replace(config.quant, refresh_every=NEVER),
        )
        hooks = Hooks(log=log, save=lambda: None, held_out_loss=lambda: 0.0, stop=context.stop)
        common = {"accelerator": context.accelerator, "communication": context.communication}
        with counter or nullcontext():
            train(state, context.inputs.calibration, config, **common, teacher=None, hooks=hooks)
        return stamps

    def figures(self, mode: str) -> Found:
        """Make the steps; return the mean seconds of one when every `REFRESH_EVERY`-th searches its clip ratios."""
        stamps = self.train(mode)[:-LAST]
        return {name: _amortized([getattr(s, name) for s in stamps]) for name in ("wall", "processor")}

    def traffic(self, mode: str) -> Found:
        """Make the steps, and return the collectives of a plain one, and the bytes this rank receives."""
        before, after = (stamp.seen for stamp in self.train(mode, CollectiveCounter())[-LAST - 2 : -LAST])
        return {
            "collectives": dict(after.counts - before.counts),
            "bytes": dict(after.num_bytes - before.num_bytes),
            "received_bytes": after.received_bytes - before.received_bytes,
        }


def _now(counter: CollectiveCounter | None) -> Stamp:
    seen = counter.seen if counter is not None else Collectives()
    copied = Collectives(Counter(seen.counts), Counter(seen.num_bytes), seen.received_bytes)
    return Stamp(time.perf_counter(), time.process_time(), copied)


def _amortized(ends: Sequence[float]) -> float:
    """Return the mean seconds of a step from the ends of one, of one that searches, and of plain ones."""
    searching, *plain = (after - before for before, after in pairwise(ends))
    return ((REFRESH_EVERY - 1) * statistics.median(plain) + searching) / REFRESH_EVERY


def measure_rank(context: Any, *, plain_steps: int, repetitions: int) -> None:
    """Train under both modes in turn, in the place of a run's phases, and leave what was found in its folder."""
    from rotexp.experiment.loading import load_model, shard_model
    from rotexp.experiment.proving import prepare_model
    from rotexp.training.state import TrainingState

    with ExitStack() as at_end:
        model = load_model(context)
        shard_model(context, model, at_end)
        prepare_model(context, model)
        state = TrainingState(model, context.config, communication=context.communication)
        stretch = Stretch(context, state, plain_steps)
        found: dict[str, Found] = {mode: {"samples": []} for mode in MODES}

        def keep(mode: str) -> None:
            found[mode]["samples"].append(stretch.figures(mode))

        interleave({mode: partial(keep, mode) for mode in MODES}, repetitions=repetitions, warmup=0)
        for mode in MODES:
            found[mode] |= stretch.traffic(mode)
    context.record.finish({})
    facts.write_json(context.folder / f"figures-{context.communication.rank}.json", found)


@contextmanager
def instead_of_phases(measuring: Callable[[Any], None]) -> Iterator[None]:
    """Let a rank do something else with its context than go through the phases of a run."""
    from rotexp.launch import rank

    with mock.patch.object(rank, "run_experiment", measuring):
        yield


def be_rank(overrides: Sequence[str], folder: Path, *, plain_steps: int, repetitions: int) -> None:
    """Measure as the rank that the environment says this process is."""
    import rotexp
    from rotexp.experiment.inputs import open_inputs
    from rotexp.launch.rank import run_rank

    config = rotexp.load_config([*OTHERS, *overrides])
    with instead_of_phases(partial(measure_rank, plain_steps=plain_steps, repetitions=repetitions)):
        run_rank(config, open_inputs(config), folder)


def measure(model: str, ranks: int, overrides: Sequence[str], *, options: Any) -> Found:
    """Measure both modes on that many ranks, and return their figures: of all ranks, and the ratios of rounds."""
    threads = options.threads or max(1, (os.cpu_count() or 1) // ranks)
    sharding = options.sharding if ranks > 1 else "no_shard"
    chosen = [*MODELS[model], f"quant={options.quant}", f"sharding={sharding}", f"launch.threads={threads}"]
    chosen += [f"data.sequence_length={options.tokens}", f"data.global_batch_size={options.batch}"]
    chosen += [f"train.micro_batch_size={options.micro_batch}", *overrides]
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "benchmarks.numerics", "--rank-folder", place, *chosen]
        command += ["--steps", str(options.steps), "--repetitions", str(options.repetitions)]
        start_ranks(command, world_size=ranks, threads=threads)
        found = [facts.read_json(Path(place) / f"figures-{rank}.json") for rank in range(ranks)]
    return {"model": model, "ranks": ranks, "sharding": sharding, "threads": threads, **compare(found)}


def compare(ranks: Sequence[dict[str, Found]]) -> Found:
    """Return of both modes the seconds of a step by rounds, that of rank 0 on the clock and those of all processors.

    Args:
        ranks: what `measure_rank` found on each.
    """
    seconds = {mode: {"wall": _walls(ranks, mode), "processor": _processors(ranks, mode)} for mode in MODES}
    ratios = {
        f"{name}_ratio": dataclasses.asdict(paired_ratios(seconds["exact"][name], seconds["fast"][name]))
        for name in ("wall", "processor")
    }
    traffic = {mode: {name: value for name, value in ranks[0][mode].items() if name != "samples"} for mode in MODES}
    return {**ratios, **{mode: seconds[mode] | traffic[mode] for mode in MODES}}


def _walls(ranks: Sequence[dict[str, Found]], mode: str) -> list[float]:
    return [sample["wall"] for sample in ranks[0][mode]["samples"]]


def _processors(ranks: Sequence[dict[str, Found]], mode: str) -> list[float]:
    rounds = zip(*(rank[mode]["samples"] for rank in ranks), strict=True)
    return [sum(sample["processor"] for sample in samples) for samples in rounds]


def table(rows: Sequence[Found]) -> facts.Table:
    """Return the figures for people."""
    columns = ["model", "ranks", "sharding", "fast (s)", "exact (s)", "exact ÷ fast (quartiles)", "processors"]
    columns += ["target", "met", "collectives", "received (MiB a rank)"]
    return facts.make_table("A step under exact against one under fast", columns, [_cells(row) for row in rows])


def _cells(row: Found) -> list[str]:
    walls = [f"{statistics.median(row[mode]['wall']):.3f}" for mode in MODES]
    ratios = [Spread(**row[f"{name}_ratio"]) for name in ("wall", "processor")]
    target = TARGETS.get(row["ranks"])
    judged = ["–", "–"] if target is None else [f"≤ {target}", _met([ratio.median for ratio in ratios], target)]
    counts = " → ".join(str(sum(row[mode]["collectives"].values())) for mode in MODES)
    received = " → ".join(f"{row[mode]['received_bytes'] / 2**20:.1f}" for mode in MODES)
    first = [row["model"], str(row["ranks"]), row["sharding"]]
    return [*first, *walls, *(ratio.text() for ratio in ratios), *judged, counts, received]


def _met(ratios: Sequence[float], target: float) -> str:
    """Return whether the target is met on the clock and by processor time."""
    return "yes" if max(ratios) <= target else "MISSED"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model on every world, and write the figures."""
    parser = facts.parser(__doc__, output="numerics.json", repetitions=5)
    parser.add_argument("--models", nargs="+", default=["tiny", "135m"], choices=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sharding", default="full", help="of several ranks")
    parser.add_argument("--quant", default="w4a4")
    parser.add_argument("--batch", type=int, default=4, help="blocks of all ranks together")
    parser.add_argument("--micro-batch", type=int, default=1, help="blocks that a rank takes at once")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a block")
    parser.add_argument("--steps", type=int, default=2, help="plain steps of a stretch; their median is one sample")
    parser.add_argument("--rank-folder", type=Path, help="be a rank, and leave its figures there")
    parser.epilog = "Further arguments are overrides."
    options, overrides = parser.parse_known_args(arguments)
    if options.rank_folder is not None:
        be_rank(overrides, options.rank_folder, plain_steps=options.steps, repetitions=options.repetitions)
        os._exit(0)  # as `benchmarks.ranks` does, and for its reason
    rows = [
        measure(model, ranks, overrides, options=options) for model, ranks in product(options.models, options.ranks)
    ]
    facts.report(options.output, [table(rows)], {"numerics": rows})


if __name__ == "__main__":
    main()
