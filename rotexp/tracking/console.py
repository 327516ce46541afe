"""What a person sees: phases, a progress bar (plain lines when not a terminal), the table of results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rotexp.metrics.profiler import PartFigures

ROWS = {
    "float": "float",
    "quantized": "no rotation",
    "hadamard": "random Hadamard",
    "trained": "trained",
}
"""Names of the evaluated variants, for people."""


class TrainingProgress:
    """The progress of the training loop."""

    def __init__(self, console: Console, *, steps: int, lines: int = 20) -> None:
        """Show `steps` steps; when not on a terminal, in about `lines` lines."""
        self._console = console
        self._steps = steps
        self._every = max(1, -(-steps // lines))
        self._began = time.perf_counter()
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, loss=float("nan"), rate=0.0)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, step: int, row: Mapping[str, float]) -> None:
        """Show a step's loss and rate, and the time left."""
        loss, rate = row["train/loss"], row["throughput/tokens_per_s"]
        self._bar.update(self._task, completed=step, loss=loss, rate=rate)
        if not self._console.is_terminal and (step == 1 or step % self._every == 0 or step == self._steps):
            left = (time.perf_counter() - self._began) / step * (self._steps - step)
            self._console.print(
                f"step {step}/{self._steps}  loss {loss:.4f}  {rate:,.0f} tokens/s  {left:.0f} s left", highlight=False
            )


def results_table(evaluation: Mapping[str, Any], *, title: str, trained: bool) -> Table:
    """Return the table of variants, each with its change against the float model.

    Args:
        trained: whether the merged rotations were trained; else their row is called merged.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for column in ("perplexity", "against float", "KL (nats)", "top-1 agreement"):
        table.add_column(column, justify="right")
    base = evaluation["float"]["perplexity"]
    labels = ROWS if trained else ROWS | {"trained": "merged"}
    for name, label in labels.items():
        if name in evaluation:
            row = evaluation[name]
            change = f"{row['perplexity'] / base - 1:+.1%}" if name != "float" else ""
            figures = (f"{row['perplexity']:.2f}", change, f"{row['kl']:.4f}", f"{row['top1_agreement']:.1%}")
            table.add_row(label, *figures)
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
