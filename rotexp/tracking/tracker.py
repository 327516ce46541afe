"""Where metrics go: the protocol of a tracker, and the one that feeds all others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rotexp.config.schema import Config
from rotexp.metrics.keys import check_keys
from rotexp.runfolder.records import MetricsFile, read_metrics, revived
from rotexp.tracking.options import TrackerKind, WandbMode

if TYPE_CHECKING:
    from rotexp.tracking.wandb import WandbMirror


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step; steps never decrease."""

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """End the run with its end state."""


class Trackers:
    """Feeds several trackers, after checking that every metric is a defined one."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Record the metrics of a step."""
        check_keys(row)
        for tracker in self._trackers:
            tracker.log(row, step=step)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """End the run."""
        for tracker in self._trackers:
            tracker.finish(summary, exit_code=exit_code)

    @property
    def run_id(self) -> str | None:
        """What W&B calls the run; None when it does not mirror it."""
        return next((found for tracker in self._trackers if (found := getattr(tracker, "run_id", None))), None)


def _record_again(mirror: WandbMirror, folder: Path, earlier: Sequence[Path]) -> None:
    """Let one offline run hold the whole history: send it the rows so far, and remove the runs that held them."""
    for row in revived(read_metrics(folder)):
        mirror.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])
    if mirror.complete():
        for run in earlier:
            shutil.rmtree(run, ignore_errors=True)


def open_trackers(
    config: Config,
    folder: Path,
    *,
    plain_config: Mapping[str, Any],
    rank: int,
    run_id: str | None = None,
    logged_to: int = -1,
) -> Trackers:
    """Open the trackers a config asks for, on rank 0; on other ranks nothing is recorded.

    Args:
        plain_config: the whole configuration as nested dicts.
        run_id: the W&B run that a resumed run goes on with.
        logged_to: the last step that W&B saw of it.
    """
    if rank:
        return Trackers([])
    trackers: list[Tracker] = [MetricsFile(folder)]
    if config.tracker.kind is TrackerKind.wandb and config.tracker.mode is not WandbMode.disabled:
        from rotexp.tracking.wandb import WandbMirror, offline_runs

        earlier = offline_runs(folder)
        seen = -1 if earlier else logged_to
        mirror = WandbMirror(config.tracker, folder, plain_config=plain_config, run_id=run_id, logged_to=seen)
        if earlier:
            _record_again(mirror, folder, earlier)
        trackers.append(mirror)
    return Trackers(trackers)
