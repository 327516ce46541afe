"""The files of a run's folder that hold its metrics and its end state."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


def finite(value: Any) -> Any:
    """Return a value JSON can hold: numbers that are not finite become the texts `nan`, `inf` and `-inf`."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the run's end state, empty if there is none yet."""
    path = folder / SUMMARY_FILE
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return summary


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Replace the run's end state."""
    write_atomically(folder / SUMMARY_FILE, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")


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
