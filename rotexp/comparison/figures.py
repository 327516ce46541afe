"""The figures of the summary table: where a run's value is found, and what the number means."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rotexp.comparison.reading import dig, number
from rotexp.comparison.runs import Run
from rotexp.metrics.keys import METRICS, Metric
from rotexp.runfolder.layout import RANK_LOGS

PATTERNS = [(re.compile(re.sub(r"<\w+>", r"\\w+", metric.name)), metric) for metric in METRICS]


@dataclass(frozen=True)
class Figure:
    """One column: a number each run has or has not; `better` is `lower`, `higher` or empty."""

    key: str
    label: str
    better: str
    value: Callable[[Run], float | None]
    unit: str = ""
    meaning: str = ""


def metric_of(key: str) -> Metric:
    """Return what is known of a logged metric; of an unknown one its name."""
    return next((metric for pattern, metric in PATTERNS if pattern.fullmatch(key)), Metric(key, "", ""))


def _registered(key: str, label: str, better: str, *path: str) -> Figure:
    """Return a figure of the registry, from the summary, or else its last logged value."""

    def value(run: Run) -> float | None:
        given = number(dig(run.summary, *path))
        return run.last(key) if given is None else given

    metric = metric_of(key)
    return Figure(key, label, better, value, metric.unit, metric.meaning)


def _evaluated(row: str, name: str, label: str, better: str) -> Figure:
    return _registered(f"eval/{row}/{name}", label, better, "evaluation", row, name)


def world_size(run: Run) -> float | None:
    """Return the ranks; of a run without an end state the number of its logs."""
    given = number(dig(run.summary, "world_size"))
    return given or float(sum(1 for _ in run.folder.glob(RANK_LOGS))) or None


def peak_memory(run: Run) -> float | None:
    """Return the largest peak of any phase and rank, of the allocator where there is one, else resident."""
    for figure in ("peak_allocated_gib_max", "peak_rss_gib_max"):
        if peaks := [phase[figure] for phase in run.memory.values() if figure in phase]:
            return max(peaks)
    return None


def steps(run: Run) -> float | None:
    """Return the optimizer steps that were done, as far as the run says."""
    given = number(dig(run.summary, "train", "steps"))
    return float(max(run.points.get("train/loss", {}), default=0)) if given is None else given


def throughput(run: Run) -> float | None:
    """Return training tokens a second over all ranks, None where nothing was trained."""
    return number(dig(run.summary, "throughput", "tokens_per_s")) or run.last("throughput/tokens_per_s")


def device_hours(run: Run, seconds: float | None) -> float | None:
    """Return ranks times hours."""
    ranks = world_size(run)
    return None if ranks is None or seconds is None else ranks * seconds / 3600


def training_cost(run: Run) -> float | None:
    """Return ranks times hours of training, as recorded or else from its seconds."""
    given = number(dig(run.summary, "train", "device_hours"))
    return device_hours(run, run.train_seconds) if given is None else given


FIGURES = (
    _evaluated("trained", "perplexity", "perplexity trained", "lower"),
    _evaluated("hadamard", "perplexity", "perplexity Hadamard", "lower"),
    _evaluated("quantized", "perplexity", "perplexity quantized", "lower"),
    _evaluated("float", "perplexity", "perplexity float", ""),
    _evaluated("trained", "kl", "KL trained", "lower"),
    _evaluated("trained", "top1_agreement", "top-1 trained", "higher"),
    Figure("train_seconds", "training", "lower", lambda run: run.train_seconds, "s", "training, as far as it went"),
    Figure("seconds", "all phases", "lower", lambda run: run.seconds, "s", "all phases together, as far as they went"),
    Figure(
        "train/device_hours",
        "training cost",
        "lower",
        training_cost,
        "device-hours",
        "ranks times hours of training",
    ),
    Figure(
        "device_hours",
        "cost",
        "lower",
        lambda run: device_hours(run, run.seconds),
        "device-hours",
        "ranks times hours of all phases",
    ),
    Figure(
        "throughput/tokens_per_s",
        "throughput",
        "higher",
        throughput,
        "tokens/s",
        "training tokens a second over all ranks and the whole training",
    ),
    _registered("throughput/mfu_pct", "MFU", "higher", "throughput", "mfu_pct"),
    Figure(
        "peak_memory",
        "peak memory",
        "lower",
        peak_memory,
        "GiB",
        "largest peak of any phase and rank: of the accelerator's allocator where there is one, else resident",
    ),
    _registered("replica/max_abs_diff", "divergence", "", "replica", "max_abs_diff"),
    _registered("rotation/orthogonality_rrt_max", "drift", "", "rotation", "orthogonality_rrt_max"),
    Figure("world_size", "ranks", "", world_size, "", "processes, one a device"),
    Figure("steps", "steps", "", steps, "", "optimizer steps done"),
)
