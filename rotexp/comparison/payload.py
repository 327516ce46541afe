"""What the page is given: the report as plain data, curves thinned."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from rotexp.comparison.axes import SEED
from rotexp.comparison.bit_equal import MEANING
from rotexp.comparison.collect import Report
from rotexp.comparison.figures import Figure, metric_of
from rotexp.comparison.runs import STEP_TIMES, Run, path_text
from rotexp.comparison.seeds import METHOD, Spread

MOST_POINTS = 600
"""Points of one curve; longer ones are thinned evenly."""

DIGITS = 7
"""Significant ones of a curve's points; a float32 has no more."""


def payload(report: Report) -> dict[str, Any]:
    """Return the report as plain data; numbers that are not finite are left to the writer of JSON."""
    curves = [curves_of(run) for run in report.runs]
    keys = dict.fromkeys(key for found in curves for key in found["series"])
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": report.command,
        "notes": report.notes,
        "method": METHOD,
        "most_points": MOST_POINTS,
        "axes": [axis.label for axis in report.axes],
        "seed": next((axis.label for axis in report.axes if axis.key == SEED), None),
        "figures": [_figure(figure) for figure in report.figures],
        "metrics": {key: _metric(key) for key in sorted(keys)},
        "runs": [_run(report, index) | found for index, found in enumerate(curves)],
        "bits": MEANING if any(report.letters) else "",
        "checks": [check.plain() for check in report.checks],
        "spreads": {key: [_spread(spread) for spread in found] for key, found in report.spreads.items()},
    }


def _run(report: Report, index: int) -> dict[str, Any]:
    run = report.runs[index]
    return {
        "name": run.name,
        "folder": path_text(run.folder),
        "status": run.status,
        "remark": run.remark,
        "bits": report.letters[index],
        "command": run.command,
        "setting": report.settings[index],
        "axes": {axis.label: axis.of(run) for axis in report.axes},
        "figures": {figure.key: figure.value(run) for figure in report.figures},
        "memory": run.memory,
        "config": run.config,
    }


def curves_of(run: Run) -> dict[str, Any]:
    """Return a run's training curves: by metric its steps and values; by step the tokens and seconds until then."""
    steps = set(run.points.get("train/loss", {}))
    series = {
        key: thinned({step: value for step, value in values.items() if step in steps})
        for key, values in run.points.items()
        if steps & values.keys() and not _of_a_phase(key)
    }
    kept = sorted({step for steps, _ in series.values() for step in steps})
    tokens = run.points.get("train/tokens", {})
    return {
        "series": series,
        "clock": {
            "steps": kept,
            "tokens": [tokens.get(step) for step in kept],
            "seconds": [_rounded(run.clock[step]) if step in run.clock else None for step in kept],
        },
    }


def _of_a_phase(key: str) -> bool:
    """Return whether a metric is that of a phase, logged once, and no curve."""
    return key.startswith("eval/") or (key.startswith("time/") and key not in STEP_TIMES) or key.count("/") > 1


def thinned(values: dict[int, float]) -> tuple[list[int], list[float]]:
    """Return steps and values, every n-th and the last, and every one that is not finite."""
    every = -(-len(values) // MOST_POINTS)
    last = max(values)
    kept = [
        (step, value)
        for place, (step, value) in enumerate(values.items())
        if place % every == 0 or step == last or not math.isfinite(value)
    ]
    return [step for step, _ in kept], [_rounded(value) for _, value in kept]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _figure(figure: Figure) -> dict[str, str]:
    named = {"key": figure.key, "label": figure.label, "unit": figure.unit}
    return named | {"meaning": figure.meaning, "better": figure.better}


def _metric(key: str) -> dict[str, str]:
    metric = metric_of(key)
    return {"unit": metric.unit, "meaning": metric.meaning}


def _spread(spread: Spread) -> dict[str, Any]:
    return {
        "setting": spread.setting,
        "seeds": len(spread.values),
        "runs": spread.num_runs,
        "mean": spread.mean,
        "deviation": spread.deviation,
        "interval": spread.interval,
        "verdict": spread.verdict,
    }
