"""Step time and peak memory of the unshard guard's modes, side by side: `python -m benchmarks.sync_modes [override …]`.

Runs of all modes are interleaved; a step's time is the median over the steps after the first of every run of a mode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rotexp.tracking.summary import versions

MODES = ("off", "selective", "universal", "event")
TIMEOUT_SECONDS = 1800


def run(mode: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Run one training in `mode` and return its steps' seconds, its peaks in GiB and the guard's counts."""
    command = [sys.executable, "-m", "rotexp.train", "tracker=jsonl", f"hydra.run.dir={folder}", *overrides]
    subprocess.run([*command, f"sync_mode={mode}"], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "mode": mode,
        "seconds": [row["time/step_s"] for row in steps[1:]],
        "losses": [row["train/loss"] for row in steps],
        "memory": {key: value for key, value in summary["memory"]["train"].items() if key.endswith("_max")},
        "sync": summary["sync"],
    }


def compare(overrides: list[str], *, repeats: int) -> list[dict[str, Any]]:
    """Run every mode `repeats` times, in turn, and return one row a mode."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for repeat in range(repeats):
            runs += [run(mode, overrides, Path(place) / f"{mode}-{repeat}") for mode in MODES]
    return [_row(mode, [found for found in runs if found["mode"] == mode], runs) for mode in MODES]


def _row(mode: str, runs: list[dict[str, Any]], every: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [second for found in runs for second in found["seconds"]]
    off = statistics.median(second for found in every if found["mode"] == "off" for second in found["seconds"])
    return {
        "mode": mode,
        "step_seconds_median": statistics.median(seconds),
        "step_seconds_min_max": (min(seconds), max(seconds)),
        "ratio_to_off": statistics.median(seconds) / off,
        "memory_gib": {key: max(found["memory"][key] for found in runs) for key in runs[0]["memory"]},
        "num_barriers": runs[0]["sync"]["num_barriers"],
        "losses_equal_off": all(found["losses"] == every[0]["losses"] for found in runs),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows for people."""
    shown = Table("sync_mode", "step (s, median)", "ratio to off", "peak memory (GiB)", "barriers", "losses equal off")
    for row in rows:
        memory = ", ".join(f"{key.split('_gib')[0]} {value:.2f}" for key, value in row["memory_gib"].items())
        figures = (f"{row['step_seconds_median']:.3f}", f"{row['ratio_to_off']:.2f}", memory)
        shown.add_row(row["mode"], *figures, str(row["num_barriers"]), "yes" if row["losses_equal_off"] else "NO")
    return shown


def main() -> None:
    """Compare the modes and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("sync_modes.json"))
    options, overrides = parser.parse_known_args()
    overrides = overrides or ["sharding=full", "train.steps=8", "evaluation.max_windows=1"]
    rows = compare(overrides, repeats=options.repeats)
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "processor": platform.machine()}
    command = f"python -m benchmarks.sync_modes --repeats {options.repeats} {' '.join(overrides)}"
    facts = {"command": command, "machine": machine, "versions": versions(), "rows": rows}
    options.output.write_text(json.dumps(facts, indent=2) + "\n")
    Console().print(table(rows))


if __name__ == "__main__":
    main()
