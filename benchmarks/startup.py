"""Time from a command to its help text and its first training step, and imports: `python -m benchmarks.startup`."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import facts
from benchmarks.timing import Spread, interleave, spread

TIMEOUT_SECONDS = 1800
POLL_SECONDS = 0.01

BARE = "import torch, transformers"
"""What any program of this kind must import: the limit that a first step is measured against."""

BASE_CLASS = "import torch, transformers.modeling_utils"
"""What any program must import that runs a model of transformers': the module of the class that all of them have."""

HELP_LIMIT = "import hydra.main"
"""What a help text is measured against: it should take no more than four times as long."""

ENTRIES = ("train", "evaluate", "export", "inspect", "report", "reproduce", "upload", "dashboard", "doctor")

SHORT = ("tracker=jsonl", "train.steps=1", "evaluation.max_windows=1")

SHOWN_SECONDS = 0.05
"""Packages that take less to import are shown as one."""


def run_command(arguments: Sequence[str]) -> str:
    """Run Python with some arguments to its end, and return what it wrote to standard error.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    ended = subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return ended.stderr


def first_step(overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Start a training, and return when it had logged its first step and what its phases took, in seconds.

    Beside the time by the clock stands that of all processors until then, with that of the processes it started.

    Raises:
        RuntimeError: it ended without a step.
    """
    command = [sys.executable, "-m", "rotexp.train", *SHORT, f"hydra.run.dir={folder}", *overrides]
    began = time.perf_counter()
    errors = folder.with_suffix(".err")
    with errors.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as process:
        while not has_step(folder / "metrics.jsonl"):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended without a step: {errors.read_text()[-500:]}")
            time.sleep(POLL_SECONDS)
        taken = time.perf_counter() - began
        spent = sum(psutil.Process(process.pid).cpu_times()[:4])  # user, system, and those of its children
        process.wait(timeout=TIMEOUT_SECONDS)
    phases = json.loads((folder / "summary.json").read_text())["time"]
    return {"first_step_s": taken, "processors": spent, **phases}


def imports(folder: Path) -> dict[str, float]:
    """Return the seconds that a training spends on the modules of each package, the longest first.

    What watches the imports takes time as well, about half as much again.
    """
    command = ["-X", "importtime", "-m", "rotexp.train", *SHORT, f"hydra.run.dir={folder}"]
    seconds: dict[str, float] = defaultdict(float)
    for line in run_command(command).splitlines():
        if found := re.fullmatch(r"import time: +(\d+) \| +\d+ \| *(\S+)", line):
            seconds[found[2].partition(".")[0]] += int(found[1]) * 1e-6
    return dict(sorted(seconds.items(), key=lambda taken: -taken[1]))


def has_step(metrics: Path) -> bool:
    """Return whether a file of metrics holds a training step."""
    return metrics.exists() and '"train/loss"' in metrics.read_text()


def measure(models: Sequence[str], *, repetitions: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time the help text, the bare imports and every model's first step, in turn.

    Returns:
        A row a command, and for every first step what its phases took.
    """
    phases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:

        def train(model: str) -> None:
            overrides = _overrides(model)
            found = first_step(overrides, Path(place) / f"{len(phases)}")
            phases.append({"model": model, **found})

        runs: dict[str, Callable[[], object]] = {
            "python -c pass": partial(run_command, ["-c", "pass"]),
            **{f"python -c '{code}'": partial(run_command, ["-c", code]) for code in (BARE, BASE_CLASS)},
            f"python -c '{HELP_LIMIT}'": partial(run_command, ["-c", HELP_LIMIT]),
            **{help_of(entry): partial(run_command, ["-m", f"rotexp.{entry}", "--help"]) for entry in ENTRIES},
            **{f"first step of {model}": partial(train, model) for model in models},
        }
        seconds = interleave(runs, repetitions=repetitions, warmup=1)
    for model in models:  # the whole run is longer than what is asked: take the moment of its first step
        steps = [row["first_step_s"] for row in phases if row["model"] == model]
        seconds[f"first step of {model}"] = steps[-repetitions:]
    return [{"command": name, "seconds": dataclasses.asdict(spread(kept))} for name, kept in seconds.items()], phases


def help_of(entry: str) -> str:
    """Return the command that shows an entry's help."""
    return f"python -m rotexp.{entry} --help"


def help_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return how many times as long as importing Hydra each help text took, by medians."""
    medians = {row["command"]: Spread(**row["seconds"]).median for row in rows}
    limit = medians[f"python -c '{HELP_LIMIT}'"]
    cells = [[help_of(entry), f"{medians[help_of(entry)] / limit:.1f}"] for entry in ENTRIES]
    return facts.make_table("Help texts", ("command", f"times as long as {HELP_LIMIT}"), cells)


def _overrides(model: str) -> list[str]:
    return ["model=tiny"] if model == "tiny" else ["model=random_llama", f"model.size={model}"]


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures for people."""
    cells = [[row["command"], Spread(**row["seconds"]).text()] for row in rows]
    return facts.make_table("From command to …", ("command", "seconds (quartiles)"), cells)


def phase_table(phases: Sequence[dict[str, Any]]) -> facts.Table:
    """Return what the phases of each model's last run took, in seconds."""
    last = {row["model"]: row for row in phases}
    names = [name for name in next(iter(last.values()), {}) if name not in ("model", "first_step_s")]
    cells = [[model, *(f"{row.get(name, 0.0):.2f}" for name in names)] for model, row in last.items()]
    return facts.make_table("Phases of the last run (s)", ("model", *names), cells)


def import_table(seconds: dict[str, float]) -> facts.Table:
    """Return what the imports took by package, in seconds."""
    shown = {package: taken for package, taken in seconds.items() if taken >= SHOWN_SECONDS}
    others = {"others": sum(seconds.values()) - sum(shown.values())}
    cells = [[package, f"{taken:.2f}"] for package, taken in (shown | others).items()]
    return facts.make_table("Imports up to a first step, watched (s)", ("package", "seconds"), cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = facts.parser(__doc__, output="startup.json", repetitions=5)
    parser.add_argument("--models", nargs="*", default=["tiny", "135m"], help="tiny, or sizes of model=random_llama")
    options = parser.parse_args(arguments)
    rows, phases = measure(options.models, repetitions=options.repetitions)
    tables = [table(rows), help_table(rows)]
    figures: dict[str, Any] = {"startup": rows, "phases": phases}
    if phases:
        with tempfile.TemporaryDirectory() as place:
            figures["imports"] = imports(Path(place) / "run")
        tables += [phase_table(phases), import_table(figures["imports"])]
    facts.report(options.output, tables, figures)


if __name__ == "__main__":
    main()
