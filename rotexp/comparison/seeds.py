"""Whether settings differ by more than the spread over seeds: Welch's interval of each difference from the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy.special import stdtrit  # type: ignore[import-untyped]

CONFIDENCE = 0.95

METHOD = (
    "Mean ± standard deviation over seeds. Against the best setting (of those with several seeds): Welch's two-sided t "
    "interval of the difference of means, 95 % for all comparisons of a table together (Bonferroni); a difference "
    "exceeds the spread over seeds when its interval does not hold 0."
)


@dataclass(frozen=True)
class Spread:
    """A setting's figure over its seeds.

    Attributes:
        values: one a seed (the mean of repeated runs); only finite figures of finished runs.
        num_runs: all its runs, those without such a figure too.
        interval: of the difference from the best setting's mean (None: it is the best, or has one seed).
        verdict: what that means, in words.
    """

    setting: str
    values: list[float]
    num_runs: int
    interval: tuple[float, float] | None
    verdict: str

    @property
    def mean(self) -> float | None:
        """The mean over seeds."""
        return mean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds, of two at least."""
        return stdev(self.values) if len(self.values) > 1 else None


def compare(
    values: Mapping[str, Mapping[str, Sequence[float]]], num_runs: Mapping[str, int], *, better: str
) -> list[Spread]:
    """Compare every setting with the best one: of those with two seeds or more, if there are any.

    Args:
        values: finite figures by setting and seed.
        num_runs: runs by setting, also of settings without figures.
        better: `lower` or `higher`.
    """
    by_setting = {name: [mean(found) for found in values.get(name, {}).values()] for name in num_runs}
    known = [name for name, found in by_setting.items() if found]
    sign = 1 if better == "lower" else -1
    repeated = [name for name in known if len(by_setting[name]) > 1]
    best = min(repeated or known, key=lambda name: sign * mean(by_setting[name]), default=None)
    level = 1 - (1 - CONFIDENCE) / max(1, len(repeated) - 1)
    spreads = []
    for name, found in by_setting.items():
        interval = welch_interval(found, by_setting[best], level=level) if best not in (None, name) else None
        verdict = _verdict(found, interval, is_best=name == best, alone=len(known) == 1)
        spreads.append(Spread(name, found, num_runs[name], interval, verdict))
    return sorted(spreads, key=lambda spread: (not spread.values, sign * (spread.mean or 0.0)))


def _verdict(found: Sequence[float], interval: tuple[float, float] | None, *, is_best: bool, alone: bool) -> str:
    if not found:
        return "no finished run to compare"
    if is_best:
        unknown = "; one seed: spread unknown" if len(found) == 1 else ""
        return f"{'the only setting' if alone else 'best'}{unknown}"
    if interval is None:
        return "one seed: spread unknown"
    held = interval[0] <= 0 <= interval[1]
    return "within the spread over seeds" if held else "exceeds the spread over seeds"


def welch_interval(first: Sequence[float], second: Sequence[float], *, level: float) -> tuple[float, float] | None:
    """Return the interval of the difference of two means (B. L. Welch, 1947); None unless each has two values.

    Args:
        level: how often the interval holds the true difference.
    """
    if min(len(first), len(second)) < 2:
        return None
    parts = [stdev(values) ** 2 / len(values) for values in (first, second)]
    difference, variance = mean(first) - mean(second), sum(parts)
    if not variance:
        return difference, difference
    shares = ((part / variance) ** 2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    freedom = 1 / sum(shares)
    half = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(variance)
    return difference - half, difference + half
