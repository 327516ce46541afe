"""A tracker of one's own: TensorBoard shows the metrics of a run, in the folder `tensorboard` of the run's.

In this folder: `python -m rotexp.train --config-dir conf plugins=[tensorboard_tracker] tracker=tensorboard`, then
`tensorboard --logdir runs`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rotexp.tracking.tracker import TrackedRun


class TensorBoard:
    """Writes every metric as a scalar under its key, and the configuration and the end state as texts."""

    def __init__(self, run: TrackedRun, *, flush_secs: int = 30) -> None:
        """Begin a file of events with what `metrics.jsonl` holds; files of earlier sessions have steps that come again.

        Args:
            flush_secs: how long, in seconds, an event may wait before it is written.
        """
        self._step = run.step
        folder = run.folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder), flush_secs=flush_secs)
        self._write_text("config", run.plain_config)
        for step, row in run.history():
            self.log(row, step=step)

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Write the metrics of a step, in double precision, as `metrics.jsonl` has them."""
        self._step = step
        for key, value in row.items():
            self._writer.add_scalar(key, value, step, new_style=True, double_precision=True)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:  # noqa: ARG002 (the summary says as much)
        """Write the end state and close the file."""
        self._write_text("summary", summary)
        self._writer.close()

    def _write_text(self, name: str, values: Mapping[str, Any]) -> None:
        indented = (f"    {line}" for line in json.dumps(values, indent=2, default=str).splitlines())  # Markdown's code
        self._writer.add_text(name, "\n".join(indented), self._step)
