"""The report as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotexp.comparison.bit_equal import MEANING
from rotexp.comparison.checks import Check
from rotexp.comparison.collect import Report, differences
from rotexp.comparison.figures import Figure
from rotexp.comparison.runs import Run
from rotexp.comparison.seeds import METHOD, Spread

STYLES = {"done": "green", "running": "cyan", "interrupted": "yellow"}
"""Of a status; any other is red."""

SHOWN = (
    "eval/trained/perplexity",
    "eval/hadamard/perplexity",
    "eval/quantized/perplexity",
    "eval/float/perplexity",
    "eval/trained/kl",
    "peak_memory",
    "train_seconds",
    "throughput/tokens_per_s",
    "world_size",
)
"""The figures of a terminal, the first ones first; the page and the exports have all."""

COMPARED = ("eval/trained/perplexity", "throughput/tokens_per_s", "peak_memory")
MOST_COMPARED = 6
"""Runs whose configurations are compared side by side in a terminal."""


UNBOUNDED = 10_000
"""Columns no table needs."""


def show(report: Report, *, written: Sequence[Path]) -> None:
    """Print the tables on standard output, into a file or a pipe as wide as they are, and name the written files.

    A reader that stops early ends the process, quietly, with exit code 1: rich does that.
    """
    console = Console(highlight=False)
    width = console.width if console.is_terminal else UNBOUNDED
    for part in parts(report, width=width):
        if not console.is_terminal:
            console.width = natural_width(part)
        console.print(part, soft_wrap=isinstance(part, Text))
    for file in written:
        console.print(Text(f"wrote {file}"), soft_wrap=True)


def natural_width(part: Table | Text) -> int:
    """Return the columns something takes when nothing is folded."""
    return Console(width=UNBOUNDED).measure(part).maximum


def parts(report: Report, *, width: int) -> Iterator[Table | Text]:
    """Yield the summary, what did not end well, settings over seeds, differing configurations, recipes, notes."""
    yield summary_table(report, width=width)
    yield from (_remark(run) for run in report.runs if run.remark)
    yield from _over_seeds(report)
    if len(report.runs) <= MOST_COMPARED and differences(report.runs):
        yield differences_table(report.runs)
    if report.checks:
        yield checks_table(report.checks)
    yield from (Text(f"note: {note}", style="yellow") for note in report.notes)


def _over_seeds(report: Report) -> Iterator[Table | Text]:
    """Yield settings compared; nothing of a single one, one line where no setting has two seeds."""
    if len(set(report.settings)) < 2:
        return
    if not any(len(spread.values) > 1 for spreads in report.spreads.values() for spread in spreads):
        yield Text("every setting has one seed: its spread is unknown, so no difference is judged", style="dim")
        return
    for figure in report.figures:
        if figure.key in COMPARED:
            yield spread_table(figure, report.spreads[figure.key])
    yield Text(METHOD, style="dim")


def summary_table(report: Report, *, width: int) -> Table:
    """Return one row a run; below it figures that are the same in all of them, and the names of those with no room.

    Args:
        width: the columns there are; figures are left out, from the last, until the table fits.
    """
    figures = sorted(
        (figure for figure in report.figures if figure.key in SHOWN), key=lambda figure: SHOWN.index(figure.key)
    )
    same = [
        figure for figure in figures if len(report.runs) > 1 and len({figure.value(run) for run in report.runs}) == 1
    ]
    shown = [figure for figure in figures if figure not in same]
    left_out: list[Figure] = []
    while natural_width(table := _summary(report, shown)) > width and shown:
        left_out.insert(0, shown.pop())
    said = [f"bits: {MEANING}"] if any(report.letters) else []
    if same:
        values = (f"{_title(figure)} {show_number(figure.value(report.runs[0]))}" for figure in same)
        said.append(f"the same in all: {', '.join(values)}")
    if left_out:
        said.append(f"no room here, but on the page: {', '.join(figure.label for figure in left_out)}")
    table.caption, table.caption_justify = "\n".join(said) or None, "left"
    return table


def _summary(report: Report, figures: Sequence[Figure]) -> Table:
    marked = any(report.letters)
    table = _table("runs", "run", "status", *["bits"] * marked, *(axis.label for axis in report.axes))
    for figure in figures:
        table.add_column("\n".join(_title(figure).split(" ")), justify="right", overflow="fold")
    for run, letter in zip(report.runs, report.letters, strict=True):
        axes = (Text(axis.of(run)) for axis in report.axes)
        numbers = (show_number(figure.value(run)) for figure in figures)
        table.add_row(Text(run.name), Text(run.status, style=_style(run)), *[letter] * marked, *axes, *numbers)
    return table


def spread_table(figure: Figure, spreads: Sequence[Spread]) -> Table:
    """Return one row a setting, best first."""
    table = _table(f"{_title(figure)} over seeds, {figure.better} is better", "setting")
    for column in ("seeds", "runs", "mean ± deviation", "difference from the best"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for spread in spreads:
        counts = (str(len(spread.values)), str(spread.num_runs))
        table.add_row(Text(spread.setting), *counts, _mean(spread), _interval(spread), spread.verdict)
    return table


def differences_table(runs: Sequence[Run]) -> Table:
    """Return the configuration keys in which runs differ, one column a run."""
    table = _table("configuration differences", "key", *(run.name for run in runs))
    for key, values in differences(runs):
        table.add_row(Text(key), *(Text(value) for value in values))
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """Return one row a recipe and run of it."""
    table = _table("recipes", "recipe", "run")
    for column in ("equal bits", "within tolerance", "moved"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for check in checks:
        counts = (str(count) for count in (check.equal, check.within, check.moved))
        said = Text(check.verdict, style="red" if check.faults else "green")
        table.add_row(Text(check.recipe), Text(check.run or ""), *counts, said)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _title(figure: Figure) -> str:
    return f"{figure.label} ({figure.unit})" if figure.unit else figure.label


def _style(run: Run) -> str:
    return STYLES.get(run.status, "red")


def _remark(run: Run) -> Text:
    return Text.assemble(f"{run.name} ", (run.status, _style(run)), f": {run.remark}")


def _mean(spread: Spread) -> str:
    deviation = "" if spread.deviation is None else f" ± {show_number(spread.deviation, digits=2)}"
    return f"{show_number(spread.mean)}{deviation}"


def _interval(spread: Spread) -> str:
    if spread.interval is None:
        return ""
    low, high = spread.interval
    return f"{(low + high) / 2:+,.3g} ({low:+,.3g} to {high:+,.3g})"


def show_number(value: float | None, *, digits: int = 4) -> str:
    """Return a number for people: `digits` significant ones, thousands grouped, empty for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.{max(1, digits - 2)}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{decimals if value % 1 else 0}f}"
