"""A run as its folder has it, whatever became of it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rotexp.comparison.reading import dig, number, readable_json, readable_rows, readable_yaml
from rotexp.runfolder.layout import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE

NO_STATUS = "summary.json says no status"


@dataclass(frozen=True)
class Run:
    """A run as its folder has it.

    Attributes:
        name: its place below what all folders asked for have in common.
        config: its configuration by dotted keys, lists whole; empty where it could not be read.
        rows: what was logged, in the order of the file.
        problems: what could not be read.
        axes: what a sweep says it varied, of a job that left no configuration.
    """

    name: str
    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    rows: list[dict[str, Any]] = field(repr=False)
    problems: list[str] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """How it ended, or `running`; `unreadable` where the summary is damaged."""
        status = str(self.summary.get("status", "unreadable"))
        return f"{status}, simulated" if self.summary.get("simulated_world") else status

    @property
    def error(self) -> str:
        """What ended it, in one line; what its summary's damage is; empty where nothing is wrong."""
        damage = next((problem for problem in self.problems if problem.startswith(SUMMARY_FILE)), NO_STATUS)
        error = self.summary.get("error") if "status" in self.summary else damage
        return " ".join(str(error).split()) if error else ""

    @property
    def remark(self) -> str:
        """What to say beside its status: the error, or when a run without an end last wrote something."""
        if self.error or self.status != "running":
            return self.error
        return f"last written {self.written:%Y-%m-%d %H:%M} UTC" if self.written else "it left no files"

    @property
    def written(self) -> datetime | None:
        """When its files last changed, None where it has none."""
        files = [self.folder / name for name in (SUMMARY_FILE, METRICS_FILE)]
        last = max((file.stat().st_mtime for file in files if file.exists()), default=None)
        return None if last is None else datetime.fromtimestamp(last, UTC)

    @property
    def command(self) -> str:
        """What repeats it; empty where its configuration is not known."""
        folder = shlex.quote(path_text(self.folder))
        return f"python -m rotexp.train --config-dir {folder} --config-name config.resolved" if self.config else ""

    @cached_property
    def points(self) -> dict[str, dict[int, float]]:
        """Every logged metric by step; of a step logged again, after resuming, the later value."""
        points: dict[str, dict[int, float]] = {}
        for row in self.rows:
            for key, value in row.items():
                if key != "step" and (shown := number(value)) is not None:
                    points.setdefault(key, {})[row["step"]] = shown
        return {key: dict(sorted(values.items())) for key, values in points.items()}

    def last(self, key: str) -> float | None:
        """Return a metric's last value."""
        values = self.points.get(key)
        return values[max(values)] if values else None

    @cached_property
    def memory(self) -> dict[str, dict[str, float]]:
        """Peaks in GiB by phase; without an end state those of the phases that ended, and of training so far."""
        found: dict[str, dict[str, float]] = {}
        for key, values in self.points.items():
            group, *names = key.split("/")
            if group == "memory" and len(names) == 2:
                found.setdefault(names[0], {})[names[1]] = values[max(values)]
        for path, value in flatten(dig(self.summary, "memory")).items():
            phase, _, figure = path.partition(".")
            if (peak := number(value)) is not None:
                found.setdefault(phase, {})[figure] = peak
        if "train" not in found and (peaks := self._training_peaks()):
            found["train"] = peaks
        return found

    def _training_peaks(self) -> dict[str, float]:
        """Return the largest peaks of the steps so far."""
        steps = {
            key: values for key, values in self.points.items() if key.startswith("memory/") and key.count("/") == 1
        }
        return {key.removeprefix("memory/"): max(values.values()) for key, values in steps.items()}

    @cached_property
    def clock(self) -> dict[int, float]:
        """Seconds of training by step: the sum of step times, a logged step standing for those since the one before."""
        seconds, before, clock = 0.0, 0, {}
        for step, value in self.points.get("time/step_s", {}).items():
            seconds += value * (step - before)
            before = step
            clock[step] = seconds
        return clock

    @property
    def train_seconds(self) -> float | None:
        """Seconds of training, as far as it went."""
        given = number(dig(self.summary, "train", "seconds"))
        return given if given is not None else max(self.clock.values(), default=None)

    @property
    def seconds(self) -> float | None:
        """Seconds of all phases together, as far as they went."""
        timed = {key: values for key, values in self.points.items() if key.startswith("time/")}
        phases = [values for key, values in timed.items() if key not in STEP_TIMES and not key.startswith(ROW_TIMES)]
        total = sum(value for values in phases for value in values.values())
        if "time/train_s" not in self.points:
            total += max(self.clock.values(), default=0.0)
        return total or None


STEP_TIMES = ("time/step_s", "time/data_s", "time/sync_s")
ROW_TIMES = "time/eval_"
"""How the times of held-out rows begin, which lie within phases."""


def path_text(path: Path) -> str:
    """Return a path as text that can be written, also where its bytes are no UTF-8."""
    return os.fsencode(path).decode("utf-8", errors="replace")


def read_run(folder: Path, *, name: str) -> Run:
    """Read one run; what cannot be read is named in its `problems`."""
    problems: list[str] = []
    summary = readable_json(folder / SUMMARY_FILE, problems.append)
    config = readable_yaml(folder / CONFIG_FILE, problems.append) or {}
    rows = readable_rows(folder / METRICS_FILE, problems.append)
    config.pop("defaults", None)
    return Run(name, folder, summary or {}, flatten(config), rows, problems)


def flatten(config: Any) -> dict[str, Any]:
    """Return a nested mapping by dotted keys; of anything else nothing."""
    flat: dict[str, Any] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict) and value:
            flat.update({f"{key}.{below}": item for below, item in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat
