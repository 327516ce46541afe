"""The table at the end of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotexp.sweep.outcome import Outcome, Status

WIDE = 1000
"""Columns where no terminal limits them: one line a job."""


def sweep_table(outcomes: Sequence[Outcome], *, folder: Path) -> Table:
    """Return all jobs of a sweep: what they vary, how they ended, what they found, where below the sweep's folder."""
    axes = list(dict.fromkeys(axis for outcome in outcomes for axis in outcome.axes))
    table = Table()
    for heading in (*axes, "status", "trained perplexity", "seconds", "folder", "error"):
        table.add_column(heading, justify="right" if heading in ("trained perplexity", "seconds") else "left")
    for outcome in outcomes:
        cells = (
            *(outcome.axes.get(axis, "") for axis in axes),
            outcome.status.value + (" before" if outcome.before else ""),
            "" if outcome.perplexity is None else f"{outcome.perplexity:.4g}",
            "" if outcome.seconds is None else f"{outcome.seconds:.0f}",
            outcome.below(folder),
            outcome.error or "",
        )
        table.add_row(*map(Text, cells), style="" if outcome.status is Status.done else "red")
    return table


def show(outcomes: Sequence[Outcome], *, folder: Path, again: str | None) -> None:
    """Print the table, and how to go on.

    Args:
        again: the command that goes on (None: there is nothing left to do).
    """
    console = Console() if Console().is_terminal else Console(width=WIDE)
    console.print(sweep_table(outcomes, folder=folder))
    done = sum(outcome.status is Status.done for outcome in outcomes)
    console.print(f"sweep folder: {folder} ({done} of {len(outcomes)} jobs done)", markup=False, soft_wrap=True)
    if again is not None:
        console.print(f"to go on: {again}", highlight=False, markup=False, soft_wrap=True)
