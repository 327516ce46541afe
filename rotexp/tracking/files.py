"""The files of a run's folder that hold its metrics and its end state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rotexp.folders import write_atomically

CONFIG_FILE = "config.resolved.yaml"
JOBS_FILE = "jobs.json"
"""Every job of a sweep and how it ended, in the sweep's folder."""
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


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
    """Return the run's end state, empty if there is none yet."""
    path = folder / SUMMARY_FILE
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return summary


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replace the run's end state."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, none if there is no such file; a last line cut short is left out.

    Raises:
        ValueError: another line is no row.
    """
    path = folder / METRICS_FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: is no row of metrics ({error}); restore the file") from None
    return rows


def truncate_metrics(folder: Path, step: int) -> int:
    """Drop the rows after a step, and a last line cut short, so that a run can go on from that step.

    Returns:
        The highest step that there was, -1 if there was none.

    Raises:
        ValueError: a line other than the last is no row; the file stays as it is.
    """
    rows = read_metrics(folder)
    if (folder / METRICS_FILE).is_file():
        kept = (json.dumps(row, allow_nan=False) + "\n" for row in rows if row["step"] <= step)
        write_atomically(folder / METRICS_FILE, "".join(kept))
    return max((row["step"] for row in rows), default=-1)


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("it has no step")
    return row


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
