"""The report as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotexp.report.collect import Report, differences
from rotexp.report.figures import Figure
from rotexp.report.seeds import METHOD, Spread

STYLES = {"done": "green", "running": "cyan", "interrupted": "yellow"}
"""Of a status; any other is red."""

SHOWN = (
    "world_size",
    "eval/float/perplexity",
    "eval/quantized/perplexity",
    "eval/hadamard/perplexity",
    "eval/trained/perplexity",
    "eval/trained/kl",
    "train_seconds",
    "peak_memory",
    "throughput/tokens_per_s",
)
"""The figures that fit a terminal; the page and the exports have all."""

COMPARED = ("eval/trained/perplexity", "peak_memory", "throughput/tokens_per_s")
MOST_COMPARED = 6
"""Runs whose configurations are compared side by side in a terminal."""

PLAIN_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""


def show(report: Report) -> None:
    """Print the tables on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for table in tables(report):
        console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def tables(report: Report) -> Iterator[Table | Text]:
    """Yield the summary, the settings compared over seeds, and, of a few runs, how their configurations differ."""
    yield summary_table(report)
    if len(set(report.settings)) < len(report.runs) or len(report.runs) > 1:
        for figure in report.figures:
            if figure.key in COMPARED:
                yield spread_table(figure, report.spreads[figure.key])
        yield Text(METHOD, style="dim")
    if 1 < len(report.runs) <= MOST_COMPARED:
        yield differences_table(report)


def summary_table(report: Report) -> Table:
    """Return one row a run."""
    figures = [figure for figure in report.figures if figure.key in SHOWN]
    errors = any(run.error for run in report.runs)
    table = _table("runs", "run", "status", *(axis.label for axis in report.axes))
    for figure in figures:
        table.add_column(f"{figure.label} ({figure.unit})" if figure.unit else figure.label, justify="right")
    if errors:
        table.add_column("error", overflow="fold", min_width=24)
    for run in report.runs:
        status = Text(run.status, style=STYLES.get(run.status, "red"))
        cells = [Text(run.name), status, *(Text(axis.of(run)) for axis in report.axes)]
        cells += [Text(show_number(figure.value(run))) for figure in figures]
        table.add_row(*cells, *([Text(run.error)] if errors else []))
    return table


def spread_table(figure: Figure, spreads: Sequence[Spread]) -> Table:
    """Return one row a setting, best first."""
    unit = f" ({figure.unit})" if figure.unit else ""
    table = _table(f"{figure.label}{unit} over seeds, {figure.better} is better", "setting")
    for column in ("seeds", "runs", "mean ± deviation", "difference from the best"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for spread in spreads:
        counts = (str(len(spread.values)), str(spread.num_runs))
        table.add_row(Text(spread.setting), *counts, _mean(spread), _interval(spread), spread.verdict)
    return table


def differences_table(report: Report) -> Table:
    """Return the configuration keys in which runs differ, one column a run."""
    table = _table("configuration differences", "key", *(run.name for run in report.runs))
    for key, values in differences(report.runs):
        table.add_row(Text(key), *(Text(value) for value in values))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _mean(spread: Spread) -> str:
    deviation = "" if spread.deviation is None else f" ± {show_number(spread.deviation, digits=2)}"
    return f"{show_number(spread.mean)}{deviation}"


def _interval(spread: Spread) -> str:
    if spread.interval is None:
        return ""
    low, high = spread.interval
    return f"{(low + high) / 2:+.3g} ({low:+.3g} to {high:+.3g})"


def show_number(value: float | None, *, digits: int = 4) -> str:
    """Return a number for people: `digits` significant ones, thousands grouped, empty for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.{digits - 2 if digits > 2 else 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{decimals if value % 1 else 0}f}"
