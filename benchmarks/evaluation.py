"""All held-out rows of a run over as many plain forward passes of their windows: `python -m benchmarks.evaluation`."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks import facts, flops
from benchmarks.timing import Spread, spread, timed
from benchmarks.variants import CPU, QUANTIZERS
from rotexp.config.schema import COMPONENTS, Config
from rotexp.data.options import DataConfig, DataSource
from rotexp.experiment.inputs import Inputs, open_inputs
from rotexp.experiment.measurements import Measurements
from rotexp.metrics.memory import peaks, reset_peaks
from rotexp.metrics.options import EvaluationConfig
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.rotation.building import build_for_run, build_plain
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.sharding.communication import Communication
from rotexp.training.options import TrainConfig

TARGET = 1.3
"""The largest ratio of all rows to as many plain forwards of their windows."""

MODELS = {
    "gguf": ModelConfig("smollm2_135m_gguf", ModelSource.gguf),
    "135m": ModelConfig("random_llama", ModelSource.random, size="135m"),
    "nano": ModelConfig("random_llama", ModelSource.random, size="nano"),
}
TIMEOUT_SECONDS = 1800
PLAIN_WINDOWS = 4
"""Windows of the plain forwards that are timed before, between and after the rows, and stand for all."""


@dataclass(frozen=True)
class Workload:
    """What is evaluated: a model of `MODELS` under w4a4 with R1 and R2, on some windows of built-in text."""

    model: str
    windows: int
    tokens: int
    r4: bool = False

    @property
    def name(self) -> str:
        """Return it in one word for tables."""
        return f"{self.model} {self.windows}×{self.tokens}{' R4' if self.r4 else ''}"

    def config(self) -> Config:
        """Return the configuration of a run."""
        return Config(
            model=MODELS[self.model],
            data=DataConfig("builtin", DataSource.builtin, sequence_length=self.tokens),
            quant=QUANTIZERS["w4a4"],
            rotation=RotationConfig("learned", r1=True, r2=True, r4=self.r4),
            optimizer=COMPONENTS["optimizer"]["cayley_sgd"],
            objective=COMPONENTS["objective"]["ce"],
            train=TrainConfig(steps=1),  # none is taken, but it parts the merged model from the Hadamard row
            evaluation=EvaluationConfig(window=self.tokens, max_windows=self.windows),
        )


@dataclass
class Evaluation:
    """The rows of one run, step by step, as a run measures them."""

    config: Config
    inputs: Inputs
    model: RotatedModel = field(init=False)
    measurements: Measurements = field(init=False)

    def __post_init__(self) -> None:
        self.model = build_for_run(self.inputs.checkpoint, self.config, dtype=torch.float32)
        materialize(self.model.network, self.inputs.checkpoint, device=CPU, added=self.model.added)
        self.measurements = Measurements(
            self.config, self.inputs, communication=Communication(), device=CPU, ranks_per_node=None, known={}
        )

    def steps(self) -> Iterator[Callable[[], None]]:
        """Yield what measures; between two of them the model is prepared, or merged."""
        yield lambda: self.measurements.as_it_comes(self.model)
        prepare(self.model)
        yield lambda: self.measurements.hadamard(self.model)
        merge(self.model)
        yield lambda: self.measurements.trained(self.model)

    def run(self) -> None:
        """Measure all rows."""
        for measure in self.steps():
            measure()


def plain_network(inputs: Inputs) -> nn.Module:
    """Return the Hugging Face model by itself."""
    model = build_plain(inputs.checkpoint, dtype=torch.float32)
    materialize(model.network, inputs.checkpoint, device=CPU)
    return model.network


@torch.no_grad()
def plain_forwards(network: nn.Module, inputs: Inputs, *, windows: int) -> None:
    """Compute whole logits of some windows, one at a time."""
    for window in inputs.evaluation[:windows]:
        network(torch.from_numpy(window)[None], use_cache=False)


def measure(workload: Workload, *, repetitions: int) -> dict[str, Any]:
    """Time whole evaluations, with some plain forwards before, between and after their rows, and count both."""
    config = workload.config()
    inputs = open_inputs(config)
    network = plain_network(inputs)
    few = min(PLAIN_WINDOWS, workload.windows)
    plain_forwards(network, inputs, windows=1)
    ratios, rows, plain = [], [], []
    for _ in range(repetitions):
        evaluation, around = Evaluation(config, inputs), []
        around.append(timed(lambda: plain_forwards(network, inputs, windows=few)))
        for step in evaluation.steps():
            step()
            around.append(timed(lambda: plain_forwards(network, inputs, windows=few)))
        rows.append(dict(evaluation.measurements.seconds))
        plain.append(sum(around) / len(around) / few * workload.windows)
        ratios.append(sum(rows[-1].values()) / (len(rows[-1]) * plain[-1]))
    found = evaluation.measurements.rows
    return {
        "workload": workload.name,
        "ratio": vars(spread(ratios)),
        "plain_seconds": vars(spread(plain)),
        "row_seconds": {row: vars(spread(each[row] for each in rows)) for row in rows[0]},
        "figures": {row: found[row] for row in rows[0]},
        **_operations(workload, inputs, network, rows=len(rows[0])),
    }


def _operations(workload: Workload, inputs: Inputs, network: nn.Module, *, rows: int) -> dict[str, int]:
    """Count the operations of one window and of two, and infer those of all."""
    plain = flops.count_flops(lambda: plain_forwards(network, inputs, windows=1))
    counted = []
    for windows in (1, 2):
        fewer = replace(inputs, evaluation=inputs.evaluation[:windows])
        counted.append(flops.count_flops(Evaluation(workload.config(), fewer).run))
    one, two = counted
    return {
        "flops": one + (workload.windows - 1) * (two - one),
        "flops_plain": rows * workload.windows * plain,
    }


def peak(workload: Workload, what: str) -> dict[str, float]:
    """Return the peak of this process, in GiB, over an evaluation or over plain forwards."""
    config = workload.config()
    inputs = open_inputs(config)
    run: Callable[[], object]
    if what == "plain":
        network = plain_network(inputs)
        run = lambda: plain_forwards(network, inputs, windows=workload.windows)  # noqa: E731
    else:
        run = Evaluation(config, inputs).run
    gc.collect()
    reset_peaks(CPU)
    run()
    return peaks(CPU)


def peak_apart(workload: Workload, what: str, *, threads: int | None) -> dict[str, float]:
    """Return what `peak` does, from a fresh process."""
    command = [sys.executable, "-m", "benchmarks.evaluation", "--peak-of", what, "--models", workload.model]
    command += ["--windows", str(workload.windows), "--tokens", str(workload.tokens)]
    command += ["--r4"] * workload.r4 + (["--threads", str(threads)] if threads else [])
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS)
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return found


def time_table(results: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the times for people."""
    columns = ["workload", "plain forwards (s)", *results[0]["row_seconds"], "ratio to plain", "target", "÷ its TFLOP"]
    rows = [
        [
            found["workload"],
            f"{found['plain_seconds']['median']:.1f}",
            *(f"{row['median']:.1f}" for row in found["row_seconds"].values()),
            Spread(**found["ratio"]).text(),
            f"≤ {TARGET}",
            f"{found['flops'] / found['flops_plain']:.2f}",
        ]
        for found in results
    ]
    return facts.make_table("All rows against as many plain forwards of their windows", columns, rows)


def memory_table(results: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the peaks for people."""
    columns = ["workload", "evaluation (GiB)", "plain forwards (GiB)"]
    rows = [[found["workload"], *(f"{found[what]:.2f}" for what in ("evaluation", "plain"))] for found in results]
    return facts.make_table("Peak memory of evaluating, resident, the weights included", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every workload, and write the figures."""
    parser = facts.parser(__doc__, output="evaluation.json", repetitions=1)
    parser.add_argument("--models", nargs="+", default=["gguf"], choices=MODELS)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--r4", action="store_true", help="rotate the inputs of the MLPs' last linears online, too")
    parser.add_argument("--no-memory", action="store_true", help="skip the processes that measure peak memory")
    parser.add_argument("--peak-of", choices=("evaluation", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    workloads = [Workload(model, options.windows, options.tokens, options.r4) for model in options.models]
    if options.peak_of:
        print(json.dumps(peak(workloads[0], options.peak_of)))
        return
    times, memory = [], []
    for workload in workloads:
        times.append(measure(workload, repetitions=options.repetitions))
        if not options.no_memory:
            found = {
                what: peak_apart(workload, what, threads=options.threads)["peak_rss_gib"]
                for what in ("evaluation", "plain")
            }
            memory.append({"workload": workload.name, **found})
    tables = [time_table(times), *([memory_table(memory)] if memory else [])]
    facts.report(options.output, tables, {"evaluation": times, "memory": memory})


if __name__ == "__main__":
    main()
