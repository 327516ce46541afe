"""Time variants in turn (A B A B …), so that a noisy machine disturbs all of them alike, and compare what was found."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of some samples, their lower and upper quartile, and how many they are."""

    median: float
    lower: float
    upper: float
    count: int

    def text(self, digits: int = 2) -> str:
        """Return `median (lower … upper)`."""
        return f"{self.median:.{digits}f} ({self.lower:.{digits}f} … {self.upper:.{digits}f})"


def spread(samples: Iterable[float]) -> Spread:
    """Summarize samples.

    Raises:
        ValueError: there are none.
    """
    values = sorted(samples)
    if not values:
        raise ValueError("no samples: repetitions must be at least 1")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper, len(values))


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warmup: int = 1,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Run every variant once a round and return its seconds, round by round.

    Args:
        warmup: rounds that are not kept.
        synchronize: waits until the device has finished; called before and after each run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(warmup + repetitions):
        for name, run in variants.items():
            taken = timed(run, synchronize=synchronize)
            if round_number >= warmup:
                seconds[name].append(taken)
    return seconds


def timed(run: Callable[[], object], *, synchronize: Callable[[], object] = lambda: None) -> float:
    """Return the seconds that one call takes."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def repeat(run: Callable[[], object], *, times: int) -> Callable[[], None]:
    """Return a function that calls `run` so often, for what is too short to be timed alone."""

    def run_often() -> None:
        for _ in range(times):
            run()

    return run_often


def paired_ratios(samples: Sequence[float], reference: Sequence[float]) -> Spread:
    """Return the spread of the ratios of samples that were taken in the same round.

    Raises:
        ValueError: the two were not taken in as many rounds.
    """
    return spread(sample / other for sample, other in zip(samples, reference, strict=True))
