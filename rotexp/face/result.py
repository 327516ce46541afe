"""What a run left in its folder, read when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotexp.config.plugins import granting
from rotexp.config.schema import Config
from rotexp.face.configs import path_of
from rotexp.runfolder.finished_run import read_config
from rotexp.runfolder.layout import METRICS_FILE, ROTATIONS_FILE, SUMMARY_FILE
from rotexp.runfolder.records import read_metrics, read_summary, revived

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # type: ignore[import-untyped]
    from torch import Tensor

STEP, LOSS = "step", "train/loss"


class RunResult:
    """A run, by its folder; every file is read at the first look.

    `RunResult("runs/readme")` opens a run of the command's.

    Attributes:
        folder: from the root.
        plugins: modules of your own that parts of the run may be of.

    Raises:
        ValueError: the folder holds no run; on access, a file of it is missing or damaged.
    """

    def __init__(self, folder: str | Path, *, plugins: Sequence[str] = ()) -> None:
        """Open a run's folder; `plugins` grants modules as `plugins=[…]` does, since a folder grants none."""
        self.folder, self.plugins = path_of(folder, key="folder"), tuple(plugins)
        if not (self.folder / SUMMARY_FILE).is_file():
            raise ValueError(f"{folder}: holds no run ({SUMMARY_FILE} is missing); name the folder of a run")

    @cached_property
    def config(self) -> Config:
        """The whole configuration of the run."""
        with granting(self.plugins):
            return read_config(self.folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The end state: `summary.json`."""
        summary: dict[str, Any] = revived(read_summary(self.folder))
        return summary

    @property
    def status(self) -> str:
        """One of running, done, failed, oom, interrupted."""
        return str(self.summary["status"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every row of `metrics.jsonl`, each with its `step`; the keys are those of `rotexp/metrics/keys.py`."""
        return [revived(row) for row in read_metrics(self.folder)]

    @cached_property
    def steps(self) -> list[int]:
        """The steps, counted from 1, whose loss was logged (every `train.log_every`, and the last)."""
        return [row[STEP] for row in self.rows if LOSS in row]

    @cached_property
    def losses(self) -> list[float]:
        """The training loss, in nats a token, of each of `steps`."""
        return [row[LOSS] for row in self.rows if LOSS in row]

    @cached_property
    def perplexities(self) -> dict[str, float]:
        """Held-out perplexity by variant: float, quantized, hadamard, trained, and what else was measured."""
        rows = self.summary.get("evaluation", {})
        return {name: row["perplexity"] for name, row in rows.items() if "perplexity" in row}

    @cached_property
    def rotations(self) -> dict[str, Tensor]:
        """The last rotations by name: (n, n), or (blocks, n, n), float32, on the CPU."""
        from rotexp.rotation.file import load_rotations

        file = self.folder / ROTATIONS_FILE
        if not file.is_file():
            reason = f"{ROTATIONS_FILE} is missing (status {self.status}); training writes it at its end"
            raise ValueError(f"{self.folder}: {reason}, so wait, or train on in this folder")
        return load_rotations(file, key="rotations").matrices

    def plot(self) -> Figure:
        """Return the loss over the steps as a plotly figure, which a notebook draws.

        Raises:
            ValueError: no step was logged.
        """
        from plotly.graph_objects import Figure, Scatter

        if not self.losses:
            raise ValueError(f"{self.folder}: {METRICS_FILE} holds no loss to draw; train at least one step")
        figure = Figure(Scatter(x=self.steps, y=self.losses, mode="lines+markers", name=LOSS))
        title = f"{self.folder.name}: {self._line()}"
        figure.update_layout(title=title, xaxis_title="step", yaxis_title="loss (nats a token)")
        return figure

    def _line(self) -> str:
        perplexities = ", ".join(f"{name} {value:.2f}" for name, value in self.perplexities.items())
        return f"perplexity {perplexities}" if perplexities else f"status {self.status}"

    def __repr__(self) -> str:
        return f"RunResult({str(self.folder)!r}, {self.status}, {len(self.losses)} losses, {self._line()})"

    def _repr_html_(self) -> str:
        rows = self.perplexities.items()
        cells = "".join(f"<tr><td>{escape(name)}</td><td>{value:.2f}</td></tr>" for name, value in rows)
        head = f"{escape(str(self.folder))}: {escape(self.status)}, {len(self.losses)} losses"
        return f"<table><caption>{head}</caption><tr><th>model</th><th>perplexity</th></tr>{cells}</table>"
