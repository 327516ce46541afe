"""The files of a run's folder that hold its metrics and its end state."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from rotexp.files.folders import write_atomically
from rotexp.files.reading import Rows, UnreadableError, read_json, read_rows
from rotexp.runfolder.layout import DAMAGED_METRICS_FILE, METRICS_FILE, SUMMARY_FILE

LOGGER = logging.getLogger(__name__)

STATUSES = ("running", "done", "failed", "oom", "interrupted")
"""What a run's end state says of it."""


def finite(value: Any) -> Any:
    """Return a value JSON can hold: numbers that are not finite become the texts `nan`, `inf` and `-inf`."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def revived(value: Any) -> Any:
    """Return a value as it was before `finite`: the texts `nan`, `inf` and `-inf` become numbers again."""
    if isinstance(value, Mapping):
        return {key: revived(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revived(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the run's end state, empty if there is none yet.

    Raises:
        UnreadableError: it is damaged.
    """
    path = folder / SUMMARY_FILE
    summary: dict[str, Any] = read_json(path) if path.exists() else {}
    return summary


def readable_summary(folder: Path) -> dict[str, Any]:
    """Return the run's end state, empty if there is none that can be read, for those who write a new one over it."""
    try:
        return read_summary(folder)
    except UnreadableError:
        return {}


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replace the run's end state."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, none if there is no such file; lines that cannot be read are left out.

    They are named in a warning, but for a last one, which was cut short.

    Raises:
        UnreadableError: it is no file.
    """
    return _read_rows(folder).whole


def truncate_metrics(folder: Path, step: int) -> int:
    """Drop the rows after a step, and lines that cannot be read, so that a run can go on from that step.

    Where more is damaged than a last line cut short, the file as it was is kept beside it.

    Returns:
        The highest step that there was, -1 if there was none.

    Raises:
        UnreadableError: it is no file.
    """
    path, rows = folder / METRICS_FILE, _read_rows(folder)
    if path.is_file():
        if _lost(rows):
            shutil.copyfile(path, _place_of_damaged(folder))
        kept = (json.dumps(row, allow_nan=False) + "\n" for row in rows.whole if row["step"] <= step)
        write_atomically(path, "".join(kept))
    return max((row["step"] for row in rows.whole), default=-1)


def _read_rows(folder: Path) -> Rows:
    rows = read_rows(folder / METRICS_FILE)
    if _lost(rows):
        LOGGER.warning("%s: %s; the others are used", folder / METRICS_FILE, rows.places)
    return rows


def _place_of_damaged(folder: Path) -> Path:
    """Return where a damaged file is kept: a place where none lies yet."""
    names = chain([DAMAGED_METRICS_FILE], (f"{DAMAGED_METRICS_FILE}-{number}" for number in count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


def _lost(rows: Rows) -> bool:
    """Return whether more cannot be read than a last line cut short."""
    return any(number < rows.lines for number in rows.damaged)


class MetricsFile:
    """`metrics.jsonl`: one object a row, flushed row by row."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Append the metrics of a step."""
        self._file.write(json.dumps(finite({"step": step, **row}), allow_nan=False) + "\n")
        self._file.flush()

    def finish(self, _summary: Mapping[str, Any], *, exit_code: int) -> None:  # noqa: ARG002 (the protocol's)
        """Close the file."""
        self._file.close()
