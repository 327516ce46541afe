"""Step time and peak memory of the unshard guard's modes, side by side: `python -m benchmarks.sync_modes [override …]`.

Whole runs of all modes are interleaved; a step's time is the median over the steps after the first of every run.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.timing import Spread, interleave, spread

MODES = ("off", "selective", "universal", "event")
DEFAULTS = ("sharding=full", "train.steps=8", "evaluation.max_windows=1")
TIMEOUT_SECONDS = 1800


def run(mode: str, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one training in `mode` and return its steps' seconds, its peaks in GiB and the guard's counts."""
    command = [sys.executable, "-m", "rotexp.train", "tracker=jsonl", f"hydra.run.dir={folder}", *overrides]
    subprocess.run([*command, f"sync_mode={mode}"], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    summary = facts.read_json(folder / "summary.json")
    return {
        "mode": mode,
        "seconds": [row["time/step_s"] for row in steps[1:]],
        "losses": [row["train/loss"] for row in steps],
        "memory": {key: value for key, value in summary["memory"]["train"].items() if key.endswith("_max")},
        "sync": summary["sync"],
    }


def compare(overrides: Sequence[str], *, modes: Sequence[str] = MODES, repetitions: int) -> list[dict[str, Any]]:
    """Run every mode, `off` among them, `repetitions` times, in turn, and return one row a mode."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:

        def keep(mode: str) -> None:
            runs.append(run(mode, overrides, Path(place) / f"{mode}-{len(runs)}"))

        interleave({mode: partial(keep, mode) for mode in modes}, repetitions=repetitions, warmup=0)
    return [row(mode, runs) for mode in modes]


def row(mode: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up one mode's runs among those of all modes."""
    own = [found for found in runs if found["mode"] == mode]
    seconds = spread(second for found in own for second in found["seconds"])
    off = spread(second for found in runs if found["mode"] == "off" for second in found["seconds"])
    return {
        "mode": mode,
        "seconds": dataclasses.asdict(seconds),
        "ratio_to_off": seconds.median / off.median,
        "memory_gib": {key: max(found["memory"][key] for found in own) for key in own[0]["memory"]},
        "num_barriers": own[0]["sync"]["num_barriers"],
        "losses_equal_off": all(found["losses"] == runs[0]["losses"] for found in own),
    }


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the rows for people."""
    columns = ("sync_mode", "step (s, quartiles)", "ratio to off", "peak memory (GiB)", "barriers", "losses equal off")
    cells = []
    for found in rows:
        memory = ", ".join(f"{key.split('_gib')[0]} {value:.2f}" for key, value in found["memory_gib"].items())
        seconds = Spread(**found["seconds"]).text(3)
        ratio, equal = f"{found['ratio_to_off']:.2f}", "yes" if found["losses_equal_off"] else "NO"
        cells.append([found["mode"], seconds, ratio, memory, str(found["num_barriers"]), equal])
    return facts.make_table("The unshard guard's modes", columns, cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the modes and write the figures."""
    parser = facts.parser(__doc__, output="sync_modes.json", repetitions=3)
    parser.epilog = f"Further arguments are overrides in place of: {' '.join(DEFAULTS)}"
    parser.add_argument("--modes", nargs="+", default=MODES[1:], choices=MODES[1:], help="beside off")
    options, overrides = parser.parse_known_args(arguments)
    rows = compare(overrides or DEFAULTS, modes=(MODES[0], *options.modes), repetitions=options.repetitions)
    facts.report(options.output, [table(rows)], {"sync_modes": rows})


if __name__ == "__main__":
    main()
