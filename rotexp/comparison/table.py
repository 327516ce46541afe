"""The summary table as rows, and as CSV and JSON: one row a run, axes as columns."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from rotexp.comparison.collect import Report
from rotexp.comparison.runs import path_text
from rotexp.runfolder.records import finite


def records(report: Report) -> list[dict[str, Any]]:
    """Return one mapping a run: its name, status, letter, axes, figures (None where it has none), error and so on."""
    return [
        {
            "run": run.name,
            "status": run.status,
            "bits": letter,
            **{axis.label: axis.of(run) for axis in report.axes},
            **{figure.key: figure.value(run) for figure in report.figures},
            "error": run.error,
            "folder": path_text(run.folder),
            "command": run.command,
        }
        for run, letter in zip(report.runs, report.letters, strict=True)
    ]


def to_csv(report: Report) -> str:
    """Return the table as CSV with a header; a figure that a run does not have is empty."""
    text = io.StringIO(newline="")
    rows = records(report)
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(report: Report) -> str:
    """Return the table as a JSON list; numbers that are not finite are texts, as in a run's own files."""
    return json.dumps(finite(records(report)), indent=2, allow_nan=False) + "\n"
