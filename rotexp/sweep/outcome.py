"""How a job ended, read from its folder and its exit code."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rotexp.config.composition import differences, to_plain
from rotexp.config.schema import RECORDING, Config
from rotexp.files.reading import UnreadableError
from rotexp.models.options import ModelConfig, ModelDtype
from rotexp.process.exit_codes import INTERRUPTED, TERMINATED, WRONG_REQUEST
from rotexp.runfolder.finished_run import read_finished_run
from rotexp.runfolder.records import STATUSES, read_summary, readable_summary, write_summary
from rotexp.tracking.limits import LONGEST_NAME
from rotexp.tracking.short_names import shortened


class Status(Enum):
    """How a job ended; the first four are those of a run's summary."""

    done = "done"
    failed = "failed"
    oom = "oom"
    interrupted = "interrupted"
    refused = "refused"
    not_started = "not started"


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: the name of its folder.
        axes: what the sweep varies, and this job's values.
    """

    name: str
    axes: Mapping[str, str]
    folder: Path
    config: Config


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        folder: where its files are (None: it was refused before it had one).
        error: what was wrong, in one line.
        seconds: from its start to its end.
        perplexity: held out, with the trained rotations.
        before: whether it was done when the sweep began.
        metric: what a sweeper minimizes.
    """

    name: str
    axes: Mapping[str, str]
    folder: Path | None
    status: Status
    error: str | None = None
    seconds: float | None = None
    perplexity: float | None = None
    before: bool = False
    metric: float | None = None

    @property
    def composed(self) -> bool:
        """Whether there was a job to start."""
        return self.status is not Status.refused or self.folder is not None

    @property
    def exit_code(self) -> int:
        """What this outcome adds to the sweep's exit code: 0 done, 1 failed, 2 refused."""
        return {Status.done: 0, Status.refused: 2}.get(self.status, 1)

    def below(self, sweep: Path) -> str:
        """Return the path of its folder in that of the sweep, also where a sweep's own subfolders are nested."""
        return "" if self.folder is None else os.path.relpath(self.folder, sweep)

    def record(self, sweep: Path) -> dict[str, Any]:
        """Return it as plain values, for a file; `below` finds the folder also after the sweep's was moved."""
        folder = None if self.folder is None else str(self.folder)
        places = {"folder": folder, "below": self.below(sweep) or None}
        return asdict(self) | {"axes": dict(self.axes), "status": self.status.value} | places


BY_SIGNAL = (INTERRUPTED, TERMINATED, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a process that a signal ended."""


def finished_before(job: Job) -> Outcome | None:
    """Return the outcome of a job whose folder holds that very run, done; None if there is something to do.

    Where its summary is damaged there is: the run itself says so, and goes on from a checkpoint if it can.

    Raises:
        ValueError: the folder holds another run, which is done.
    """
    summary = readable_summary(job.folder)
    if summary.get("status") != Status.done.value:
        return None
    then = read_finished_run(job.folder, key=None).config
    now = replace(job.config, model=_as_resolved(job.config.model, then.model))
    differing = differences(to_plain(then), to_plain(now))
    if changed := sorted(key for key in differing if not key.startswith(RECORDING)):
        raise ValueError(
            f"{job.folder}: {job.name} is done with another {', '.join(changed)}; choose another folder by "
            f"hydra.sweep.dir=DIR, or by hydra.sweep.subdir where that is set"
        )
    return _from_summary(job, summary, seconds=_seconds(summary), before=True)


def _as_resolved(model: ModelConfig, then: ModelConfig) -> ModelConfig:
    """Return a model with what a run resolved: the whole path, the commit of a branch, the dtype of its checkpoint."""
    same = model.path and then.path and Path(model.path).resolve() == Path(then.path).resolve()
    path = then.path if same else model.path
    commit = model.revision if re.fullmatch("[0-9a-f]{40}", model.revision or "") else then.revision
    dtype = then.dtype if model.dtype is ModelDtype.auto else model.dtype
    return replace(model, path=path, revision=commit, dtype=dtype)


def left(job: Job) -> Outcome:
    """Return the outcome of a job that somebody else ran, by what it left."""
    try:
        summary = read_summary(job.folder)
    except UnreadableError as error:
        return Outcome(job.name, job.axes, job.folder, Status.failed, str(error))
    if summary.get("status") not in STATUSES:
        return Outcome(job.name, job.axes, job.folder, Status.failed, "it left no summary; see the scheduler's log")
    if summary["status"] == "running":
        summary |= {"status": Status.failed.value, "error": "it did not end by itself; see the scheduler's log"}
    return _from_summary(job, summary, seconds=_seconds(summary))


def _seconds(summary: Mapping[str, Any]) -> float:
    """Return how long all phases took."""
    phases = summary.get("time")
    return (
        sum((number for name in phases if (number := figure(phases, name))), 0.0) if isinstance(phases, dict) else 0.0
    )


@dataclass(frozen=True)
class Ending:
    """What is known of a process that ended.

    Attributes:
        code: its exit code, negative for a signal.
        said: the last line it said of itself on standard error.
        written: whether the summary changed while it ran.
        out_of_memory: whether the system ran out of memory meanwhile.
    """

    code: int
    seconds: float
    said: str | None = None
    written: bool = True
    out_of_memory: bool = False


def ended(job: Job, ending: Ending, *, interrupted: bool = False) -> Outcome:
    """Return the outcome of a job whose process ended; what the process could not record is recorded.

    Args:
        interrupted: whether the sweep ended it.
    """
    summary = readable_summary(job.folder) if ending.written else {}
    status = summary.get("status") if summary.get("status") in STATUSES else "running"
    if ending.code == WRONG_REQUEST and not summary:
        return Outcome(job.name, job.axes, job.folder, Status.refused, ending.said, ending.seconds)
    if status == "running" or (status == "done" and ending.code != 0):
        status = Status.interrupted if interrupted or ending.code in BY_SIGNAL else Status.failed
        if ending.code == -signal.SIGKILL and ending.out_of_memory:
            status = Status.oom
        summary = readable_summary(job.folder) | {"status": status.value, "error": _reason(ending, status)}
        job.folder.mkdir(parents=True, exist_ok=True)
        write_summary(job.folder, summary)
    return _from_summary(job, summary, seconds=ending.seconds)


def _reason(ending: Ending, status: Status) -> str:
    if status is Status.interrupted and ending.said:
        return ending.said
    if ending.code < 0:
        name = signal.Signals(-ending.code).name
        return f"killed by {name}{' (the system was out of memory)' if ending.out_of_memory else ''}"
    return f"the process ended with exit code {ending.code} before the run was done"


def _from_summary(job: Job, summary: Mapping[str, Any], *, seconds: float, before: bool = False) -> Outcome:
    return Outcome(
        name=job.name,
        axes=job.axes,
        folder=job.folder,
        status=Status(summary["status"]),
        error=summary.get("error"),
        seconds=seconds,
        perplexity=figure(summary, "evaluation.trained.perplexity"),
        before=before,
        metric=figure(summary, job.config.sweep.optimized_metric),
    )


def figure(summary: Mapping[str, Any], path: str) -> float | None:
    """Return the number at a dotted path of a summary, None if there is none."""
    value: Any = summary
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def grouped(config: Config, sweep: Path) -> Config:
    """Return a job's configuration, its W&B group the name of the sweep's folder unless it names one."""
    tracker = config.tracker
    group = tracker.group or shortened(sweep.absolute().name, LONGEST_NAME)
    return replace(config, tracker=replace(tracker, group=group))
