"""What a tracker is: the protocol that rotexp's own and the user's are written against, and what they are opened by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rotexp.runfolder.records import read_metrics, revived


class Tracker(Protocol):
    """Takes the metrics of a run, on rank 0 alone, beside `metrics.jsonl`.

    Its class is called as `Class(run, **options)` with a `TrackedRun` and the options that stand beside `_target_`.
    What it raises is said once and never ends the run; the calls after it are made all the same. The run waits for
    every call: what takes long belongs on a thread of the tracker's own, and one that is left must be a daemon.

    A tracker may have an attribute `run_id`, a text or None: what it calls the run. Checkpoints keep it, and a resumed
    run's tracker is given it.
    """

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Record metrics of a step, or of a phase after it; steps never decrease, and one may have several rows.

        Args:
            row: values under keys that `rotexp.metrics.keys` defines, perhaps nan or infinite.
        """

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """End the run: the last call, also of one that failed or was interrupted.

        Args:
            summary: what `summary.json` holds, or as much of it as there is; `status` says how the run ended.
            exit_code: 0 where it is done, else 1.
        """


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records.

    Attributes:
        folder: of the run.
        plain_config: the whole configuration as nested dicts.
        step: the step after which it begins: 0, or that of the checkpoint it is resumed from.
        logged_to: the last step that an earlier session logged, -1 if none did; those after `step` come again.
        run_id: what the tracker called the run in an earlier session.
    """

    folder: Path
    plain_config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    logged_to: int = -1
    run_id: str | None = None

    def history(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the metrics of every row of earlier sessions that the run goes on from."""
        for row in revived(read_metrics(self.folder)):
            yield row.pop("step"), row
