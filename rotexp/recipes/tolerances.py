"""Tolerances of figures, from runs that differ by rounding noise alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rotexp.recipes.figures import Value, difference, largest
from rotexp.recipes.recipe import Figure

FACTOR = 2.0
"""How many times the largest deviation that was found another run may differ."""
LEAST = 1e-5
"""The smallest tolerance, relative to the figure: other kernels may round where no noise was felt."""


def with_tolerances(figures: Mapping[str, Figure], others: Sequence[Mapping[str, Value]]) -> dict[str, Figure]:
    """Return figures with a tolerance each, measured over other runs; without such they stay as they are.

    Raises:
        ValueError: a run has no such figure, or one that does not compare.
    """
    if not others:
        return dict(figures)
    return {name: replace(figure, tolerance=_tolerance(name, figure.value, others)) for name, figure in figures.items()}


def _tolerance(name: str, value: Value, others: Sequence[Mapping[str, Value]]) -> float:
    deviations = [difference(value, other[name]) if name in other else math.inf for other in others]
    if not math.isfinite(max(deviations)):
        raise ValueError(f"{name}: a run under noise has no such figure, or none that compares; no tolerance is known")
    return rounded_up(max(FACTOR * max(deviations), LEAST * largest(value)))


def rounded_up(number: float) -> float:
    """Return a number above zero, or zero, with two significant digits and no smaller."""
    if number == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return float(f"{math.ceil(number / unit) * unit:.1e}")
