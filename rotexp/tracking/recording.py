"""Open the trackers of a run and feed them all; only `metrics.jsonl`, which is the truth, may fail a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rotexp.config.components import Component
from rotexp.config.targets import build, check_members
from rotexp.errors.library import reason
from rotexp.metrics.keys import check_keys
from rotexp.runfolder.records import MetricsFile
from rotexp.tracking.options import TrackerConfig
from rotexp.tracking.tracker import TrackedRun, Tracker

LOGGER = logging.getLogger(__name__)

WANDB = "wandb"
"""What a run's tracker ids call W&B; those of others are called by their `_target_`."""


class Mirror:
    """A tracker beside `metrics.jsonl`: whatever it raises is said once, and the run goes on."""

    def __init__(self, name: str, opening: Callable[[], Tracker]) -> None:
        self.name = name
        self._failed = False
        self._tracker: Tracker | None = None
        self._attempt(lambda: self._open(opening))

    @property
    def run_id(self) -> str | None:
        """What the tracker calls the run, if it says so."""
        run_id = getattr(self._tracker, "run_id", None)
        return run_id if isinstance(run_id, str) else None

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Pass the metrics of a step on."""
        if (tracker := self._tracker) is not None:
            self._attempt(lambda: tracker.log(dict(row), step=step))

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """Pass the end on."""
        if (tracker := self._tracker) is not None:
            self._attempt(lambda: tracker.finish(summary, exit_code=exit_code))

    def _open(self, opening: Callable[[], Tracker]) -> None:
        self._tracker = opening()

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # a mirror must never end a run
            if not self._failed:
                LOGGER.warning(
                    "tracker %s: %s; the run goes on, metrics.jsonl holds everything", self.name, reason(error)
                )
            self._failed = True


class Trackers:
    """Feeds several trackers, after checking that every metric is a defined one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = [*trackers]

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
    def run_ids(self) -> dict[str, str]:
        """What trackers call the run, by tracker; W&B's is `wandb`."""
        mirrors = (tracker for tracker in self._trackers if isinstance(tracker, Mirror))
        return {mirror.name: mirror.run_id for mirror in mirrors if mirror.run_id is not None}


def check_own_tracker(config: TrackerConfig) -> None:
    """Refuse a tracker of the user's own that lacks what runs call.

    Raises:
        ValueError: it does.
    """
    if config.target is not None:
        check_members(config, key="tracker", protocol=Tracker)


def open_trackers(
    config: TrackerConfig, run: TrackedRun, *, rank: int, run_ids: Mapping[str, str] | None = None
) -> Trackers:
    """Open the trackers a config asks for, on rank 0; on other ranks nothing is recorded.

    Args:
        run_ids: what the trackers of an earlier session called the run.
    """
    if rank:
        return Trackers([])
    known = run_ids or {}
    mirrors = [
        Mirror(part.name, partial(build, part, replace(run, run_id=known.get(part.name)))) for part in _mirrors(config)
    ]
    return Trackers([MetricsFile(run.folder), *mirrors])


def _mirrors(config: TrackerConfig) -> Iterator[Component]:
    """Yield what records a run beside `metrics.jsonl`."""
    if config.mirrors_to_wandb:
        yield Component(WANDB, "rotexp.tracking.wandb.open_mirror", {"config": config})
    if config.target is not None:
        yield Component(config.target, config.target, config.options)
