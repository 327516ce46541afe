"""Show how a run that was made again compares with its recipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotexp.recipes.comparing import Compared, Comparison, Verdict
from rotexp.recipes.figures import Value
from rotexp.recipes.recipe import NOISE, Recipe

UNBOUNDED = 10_000
"""Columns no table needs."""
STYLES = {Verdict.equal: "green", Verdict.within: "yellow", Verdict.differs: "red"}


def show_differing(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print what is not as it was when the recipe was made."""
    if not rows:
        _print(Text("versions, kind of machine, texts and model are the recipe's"))
        return
    table = _table("what is not as it was", "", "recipe", "here")
    for row in rows:
        table.add_row(*map(Text, row))
    _print(table)


def show_comparison(recipe: Recipe, found: Comparison) -> None:
    """Print every figure with its verdict, and what that comes to in the last line."""
    table = _table(f"recipe {recipe.name}, made again", "figure", "recipe", "now", "verdict")
    for figure in found.figures:
        said = Text(_verdict(figure), style=STYLES[figure.verdict])
        table.add_row(figure.name, _shown(figure.before), _shown(figure.now), said)
    for name, (before, now) in found.digests.items():
        same = before == now
        said = Text(Verdict.equal.value if same else "other bits", style="green" if same else "yellow")
        table.add_row(name, before[:16], now[:16], said)
    _print(table)
    _print(Text(outcome(recipe, found)))


def outcome(recipe: Recipe, found: Comparison) -> str:
    """Return in one line what a comparison comes to."""
    total, differing = len(found.figures), found.count(Verdict.differs)
    if found.bits_equal:
        return f"reproduced: all {total} figures, weights and rotations have equal bits"
    if not found.same_weights:
        return "not reproduced: the model has other weights than the recipe's"
    counts = f"{found.count(Verdict.equal)} of {total} figures have equal bits"
    if found.bits_expected:
        return f"not reproduced: equal bits are expected here (numerics=exact), and {counts}"
    within = f"{counts}, {found.count(Verdict.within)} more are within the recipe's tolerances"
    if not differing:
        return f"reproduced: {within}"
    if recipe.measured:
        return f"not reproduced: {within}, {differing} differ by more"
    remedy = f"--write FILE --noise N measures one, by {NOISE}"
    return f"not reproduced: {counts}, {differing} differ, and no tolerance was measured ({remedy})"


def _verdict(figure: Compared) -> str:
    if figure.verdict is Verdict.equal:
        return str(figure.verdict.value)
    if not math.isfinite(figure.difference):
        return f"{figure.verdict.value}: they do not compare"
    allowed = "" if figure.tolerance is None else f" of {figure.tolerance:.1e}"
    return f"{figure.verdict.value}{allowed}: by {figure.difference:.1e}"


def _shown(value: Value | None) -> str:
    """Return a figure with all its bits; of a long one how many there are, and the last."""
    if isinstance(value, tuple):
        return f"{len(value)} of them, last {value[-1]!r}"
    return "none" if value is None else repr(value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(part: Table | Text) -> None:
    """Print on standard output, into a file or a pipe as wide as it is."""
    width = None if sys.stdout.isatty() else UNBOUNDED
    Console(highlight=False, width=width).print(part, soft_wrap=isinstance(part, Text))
