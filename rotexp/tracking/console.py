"""What a person sees: the facts at the start, progress (plain lines when not a terminal), the table of results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from rotexp.metrics.profiler import PartFigures

ROWS = {
    "float": "float",
    "quantized": "no rotation",
    "hadamard": "random Hadamard",
    "start": "before training",
    "average": "trained, averaged",
    "trained": "trained",
}
"""Names of the evaluated variants, for people."""

MEMORY = ("memory/peak_allocated_gib_max", "memory/peak_rss_gib_max")
"""What a step's peak of memory is, the first that a row has."""

UTILIZATION = "throughput/mfu_pct"


@dataclass(frozen=True)
class StartUp:
    """What a person wants to know before a run has cost anything.

    Attributes:
        model: what the model calls itself.
        parameters: how many it has.
        sharding: how they are split, in words, as it came out.
        devices: how many of what.
        tokens_per_step: over all ranks.
        steps: those still to be done.
        folder: of the run.
        step_seconds: how long one step takes, if one was measured.
    """

    model: str
    parameters: int
    sharding: str
    devices: str
    tokens_per_step: int
    steps: int
    folder: Path
    step_seconds: float | None = None


def startup_panel(facts: StartUp) -> Panel:
    """Return the facts as a panel."""
    total = facts.tokens_per_step * facts.steps
    left = None if facts.step_seconds is None else duration(facts.step_seconds * facts.steps)
    rows = {
        "model": f"{facts.model}, {facts.parameters:,} parameters",
        "sharding": facts.sharding,
        "devices": facts.devices,
        "tokens": f"{facts.tokens_per_step:,} a step, {total:,} in all",
        "steps": f"{facts.steps:,}" + (f", about {left}" if left else "; the first says how long they take"),
        "folder": str(facts.folder),
    }
    table = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return Panel(table, title="rotexp", title_align="left", expand=False)


def duration(seconds: float) -> str:
    """Return a time as people say it: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class TrainingProgress:
    """The progress of a run over its phases, and of the training loop over its steps."""

    def __init__(
        self, console: Console, *, steps: int, phases: Sequence[str] = (), done: int = 0, lines: int = 20
    ) -> None:
        """Show `steps` steps; when not on a terminal, in about `lines` lines.

        Args:
            phases: the phases to come, in their order.
            done: steps that an earlier session took.
        """
        self._console = console
        self._steps, self._done = steps, done
        self._phases = list(phases)
        self._every = max(1, -(-(steps - done) // lines))
        self._began = time.perf_counter()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._phase = self._bars.add_task("run", total=len(self._phases), note="", visible=bool(self._phases))
        self._step = self._bars.add_task("train", total=steps, completed=done, note="", visible=steps > 0)

    def __enter__(self) -> TrainingProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def phase(self, name: str) -> None:
        """Show which phase begins; its steps are timed from here."""
        self._began = time.perf_counter()
        self._bars.update(self._phase, completed=self._phases.index(name), note=name)

    def show(self, step: int, row: Mapping[str, float]) -> None:
        """Show a step's loss, rate, utilization and memory (where the row has them), and the time left."""
        left = (time.perf_counter() - self._began) / max(step - self._done, 1) * (self._steps - step)
        figures = [f"loss {row['train/loss']:.4f}", f"{row['throughput/tokens_per_s']:,.0f} tokens/s"]
        if UTILIZATION in row:
            figures.append(f"MFU {row[UTILIZATION]:.1f} %")
        figures += [f"{row[key]:.2f} GiB" for key in MEMORY if key in row][:1]
        note = "  ".join([*figures, f"{duration(left)} left"])
        self._bars.update(self._step, completed=step, note=note)
        since = step - self._done
        if not self._console.is_terminal and (since == 1 or since % self._every == 0 or step == self._steps):
            self._console.print(f"step {step}/{self._steps}  {note}", highlight=False)


def results_table(
    evaluation: Mapping[str, Any], *, title: str, trained: bool, seconds: Mapping[str, float] | None = None
) -> Table:
    """Return the table of variants, each with its change against the float model.

    Args:
        seconds: how long those took that were measured now.
        trained: whether the merged rotations were trained; else their row is called merged.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("model", no_wrap=True)
    for column in ("perplexity", "against float", "KL (nats)", "top-1 agreement", "time"):
        table.add_column(column, justify="right")
    base = evaluation["float"]["perplexity"]
    labels = ROWS if trained else ROWS | {"trained": "merged"}
    for name, label in labels.items():
        if name in evaluation:
            row = evaluation[name]
            change = f"{row['perplexity'] / base - 1:+.1%}" if name != "float" else ""
            figures = (f"{row['perplexity']:.2f}", change, f"{row['kl']:.4f}", f"{row['top1_agreement']:.1%}")
            taken = (seconds or {}).get(name)
            table.add_row(label, *figures, "" if taken is None else duration(taken))
    return table


def profile_table(figures: Sequence[PartFigures], *, num_steps: int) -> Table:
    """Return the table of where a training step went."""
    table = Table(title=f"where a step goes (mean of {num_steps})", title_justify="left")
    table.add_column("part")
    for column in ("host ms", "device ms", "calls"):
        table.add_column(column, justify="right")
    for part in figures:
        name = f"  {part.name} (itself)" if part.operator else part.name
        table.add_row(name, f"{part.host_ms:,.1f}", f"{part.device_ms:,.1f}", f"{part.calls:,.0f}")
    return table
