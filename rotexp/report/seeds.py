"""Whether settings differ by more than the spread over seeds: Welch's interval of each difference from the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

CONFIDENCE = 0.95
STRIPS = 64
HALVINGS = 45

METHOD = (
    "Mean ± standard deviation over seeds. Against the best setting (of those with several seeds): Welch's two-sided t interval of the difference of "
    "means, 95 % for all comparisons of a table together (Bonferroni); a difference exceeds the spread over seeds when "
    "its interval does not hold 0."
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


def compare(values: Mapping[str, Mapping[str, Sequence[float]]], num_runs: Mapping[str, int], *, better: str) -> list[Spread]:
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
    freedom = variance**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True)
    )
    half = student_quantile((1 + level) / 2, freedom=freedom) * math.sqrt(variance)
    return difference - half, difference + half


def student_quantile(probability: float, *, freedom: float) -> float:
    """Return the quantile of Student's t for a probability above one half and at least one degree of freedom.

    With t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), up to its constant: smooth and bounded,
    so it is summed by Simpson's rule and the angle found by halving.
    """
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        angle = (low + high) / 2
        if 0.5 + constant * _cosine_power(angle, freedom - 1) < probability:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _cosine_power(angle: float, power: float) -> float:
    """Return the integral of cos^power from 0 to an angle, by Simpson's rule."""
    width = angle / STRIPS
    weights = (1 if index in (0, STRIPS) else 4 if index % 2 else 2 for index in range(STRIPS + 1))
    return width / 3 * sum(weight * math.cos(index * width) ** power for index, weight in enumerate(weights))
