"""Everything a report says, from the runs' folders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rotexp.comparison import bit_equal
from rotexp.comparison.axes import SEED, Axis, differing_keys, find_axes, setting, value_text
from rotexp.comparison.checks import Check
from rotexp.comparison.figures import FIGURES, Figure
from rotexp.comparison.find import read_runs
from rotexp.comparison.reading import dig
from rotexp.comparison.runs import Run
from rotexp.comparison.seeds import Spread, compare

PROTOCOL = ("text_digest", "window", "stride", "windows")
"""What two runs' held-out figures must share to be comparable."""


@dataclass(frozen=True)
class Report:
    """What is compared.

    Attributes:
        command: what makes this report again.
        axes: in which the runs differ.
        figures: those at least one run has.
        settings: of each run, what it shares with runs of other seeds.
        spreads: settings compared, by the figure's key.
        notes: what a reader must know: files that could not be read, figures that do not compare, bits that should.
        letters: of each run, the same for those that found the same bits; empty of one that is alone.
        checks: recipes compared with runs of them, where that was asked for.
    """

    command: str
    runs: list[Run]
    axes: list[Axis]
    figures: list[Figure]
    settings: list[str]
    spreads: dict[str, list[Spread]]
    notes: list[str]
    letters: list[str]
    checks: Sequence[Check] = ()


def collect(folders: Sequence[Path], *, command: str) -> Report:
    """Read and compare the runs below some folders.

    Raises:
        ValueError: one of them holds no run.
    """
    notes: list[str] = []
    runs = read_runs(folders, complain=notes.append)
    axes = find_axes(runs)
    figures = [figure for figure in FIGURES if any(figure.value(run) is not None for run in runs)]
    settings = [setting(run, axes) for run in runs]
    spreads = {figure.key: compare_settings(figure, runs, settings) for figure in figures if figure.better}
    found = [bit_equal.findings(run) for run in runs]
    notes += [*_damaged(runs), *_protocols(runs), *bit_equal.parted(runs, found)]
    return Report(command, runs, axes, figures, settings, spreads, notes, bit_equal.letters(found))


def compare_settings(figure: Figure, runs: Sequence[Run], settings: Sequence[str]) -> list[Spread]:
    """Compare settings by a figure of their finished runs; held-out figures within the protocol most runs share."""
    protocols = [protocol(run) for run in runs if run.status == "done"]
    usual = max(protocols, key=protocols.count, default="")
    values: dict[str, dict[str, list[float]]] = {}
    for run, name in zip(runs, settings, strict=True):
        value = figure.value(run)
        comparable = protocol(run) == usual or not figure.key.startswith("eval/")
        if run.status == "done" and comparable and value is not None and math.isfinite(value):
            values.setdefault(name, {}).setdefault(value_text(run.config, SEED), []).append(value)
    num_runs = {name: settings.count(name) for name in settings}
    return compare(values, num_runs, better=figure.better)


def protocol(run: Run) -> str:
    """Return what a run's held-out figures were taken on, empty where it does not say."""
    given = dig(run.summary, "evaluation", "protocol")
    return ", ".join(f"{key} {given[key]}" for key in PROTOCOL if key in given) if isinstance(given, dict) else ""


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return every configuration key in which runs differ, with each run's value."""
    configs = [run.config for run in runs]
    known = [config for config in configs if config]
    return [(key, [value_text(config, key) for config in configs]) for key in differing_keys(known)]


def _damaged(runs: Sequence[Run]) -> list[str]:
    return [f"{run.name}: {problem}" for run in runs for problem in run.problems]


def _protocols(runs: Sequence[Run]) -> list[str]:
    """Warn of held-out figures that were taken on different texts or windows."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if text := protocol(run):
            found.setdefault(text, []).append(run.name)
    if len(found) < 2:
        return []
    groups = "; ".join(
        f"{text}: {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1) for text, names in found.items()
    )
    return [f"perplexity, KL and top-1 agreement compare only within one protocol, and here are {len(found)}: {groups}"]
