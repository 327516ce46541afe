"""All tables of benchmarks/README.md, of one commit, by one command that resumes: `python -m benchmarks.all`.

Every program runs in processes of its own and leaves its JSON in a folder named after the commit. What lies there is
not measured again, so the command goes on where it was interrupted or where a program failed. In the end the tables of
that commit, and only they, stand in the page; what is missing is said to be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import facts, page
from rotexp.recipes.origin import CHANGED

TINY_RUN = "model=random_llama data.sequence_length=16 evaluation.window=16 evaluation.max_windows=1"


@dataclass(frozen=True)
class Program:
    """A measuring program whose tables the page shows, in the section of its name.

    Attributes:
        module: of `benchmarks`; it takes `--output`.
        arguments: of its table, as on a command line.
        quick: those of the smallest sizes, to test that all programs work together.
        part: what tells several runs of one program apart.
        minutes: after which it is ended.
    """

    module: str
    arguments: str = ""
    quick: str = ""
    part: str = ""
    minutes: float = 20.0

    @property
    def name(self) -> str:
        """Return what it is called in the folder and on the command line."""
        return f"{self.module}-{self.part}" if self.part else self.module

    def command(self, output: Path, *, quick: bool) -> list[str]:
        """Return the command that measures."""
        arguments = shlex.split(self.quick if quick else self.arguments)
        return [sys.executable, "-m", f"benchmarks.{self.module}", "--output", str(output), *arguments]


TINY_STEP = "--models nano --batches 1 --tokens 16 --repetitions 1 --variants w4a4 --no-memory"
PROGRAMS = (
    Program("step", "--batches 1 --repetitions 3", TINY_STEP, part="1"),
    Program("step", "--batches 4 --repetitions 2 --variants w16a4 w4a4", TINY_STEP, part="4"),
    Program("evaluation", "--windows 16", "--models nano --windows 2 --tokens 16 --repetitions 1 --no-memory"),
    Program("operations", "--repetitions 1", "--model nano --tokens 16 --repetitions 1"),
    Program("optimizer", "--repetitions 7", "--sets '48² + 2 × 12²' --repetitions 1"),
    Program("quantizers", "--repetitions 7", "--shapes 32x48 --repetitions 1"),
    Program("sharding", "", "--model nano --ranks 2 --batch 2 --tokens 8 --repetitions 1 --variants w4a4"),
    Program("own_rows", "", "--models nano"),
    Program("scale", "", "--sizes 1b --strategies no_shard --worlds 2 --tokens 16"),
    Program("trained_memory", "--model nano", "--model nano --tokens 8 --strategies no_shard"),
    Program("startup", "--models tiny --repetitions 3", "--models --repetitions 1"),
    Program(
        "overhead",
        "--trackers wandb --repetitions 4",
        f"--runs 'rotations, full' --ranks 2 --trackers jsonl --repetitions 1 {TINY_RUN}",
    ),
    Program("drift", "", f"--seeds 1 --steps 2 {TINY_RUN}"),
    Program(
        "numerics",
        "--repetitions 3",
        "--models nano --ranks 1 2 --batch 2 --tokens 16 --steps 1 --repetitions 1",
        minutes=60.0,
    ),
    Program("sync_modes", "--repetitions 2", f"--modes event --repetitions 1 sharding=full train.steps=2 {TINY_RUN}"),
)
"""In the order of the page. A new program is a line here: its section comes at the page's end until it is moved."""


class ChangedError(Exception):
    """The working tree is not, or no longer, the commit whose figures are taken."""


def measure(program: Program, folder: Path, *, commit: str | None, quick: bool) -> str | None:
    """Run a program unless its figures are there.

    Returns:
        Why there are no figures, or None.

    Raises:
        ChangedError: the working tree is of another commit before or after; then no figures are kept.
    """
    output = folder / f"{program.name}.json"
    if output.exists():
        print(f"{program.name}: measured before", flush=True)
        return None
    if facts.commit() != commit:
        raise ChangedError(f"the working tree changed; go back to {commit} and run again")
    fresh, log = folder / f"{program.name}.new", folder / f"{program.name}.log"
    fresh.unlink(missing_ok=True)
    print(f"{program.name}: up to {program.minutes:.0f} min", end=" ", flush=True)
    began = time.monotonic()
    failure = _run(program.command(fresh, quick=quick), log, seconds=60 * program.minutes)
    failure = failure or (None if fresh.exists() else "left no figures")
    print(f"{failure or 'done'} after {time.monotonic() - began:.0f} s", flush=True)
    if failure:
        return failure
    if facts.read_json(fresh)["commit"] != commit:
        fresh.unlink()
        raise ChangedError(f"{program.name}: the working tree changed while it ran; go back to {commit} and run again")
    fresh.replace(output)
    return None


def _run(command: Sequence[str], log: Path, *, seconds: float) -> str | None:
    """Run a command to its end, what it prints in a file, and return why it failed, or None."""
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=facts.ROOT, stdout=stream, stderr=stream, start_new_session=True)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"ended, since it took more than {seconds / 60:.0f} min"
    finally:
        with contextlib.suppress(ProcessLookupError):  # its ranks as well
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None if status == 0 else f"failed with status {status}: {(log.read_text().splitlines() or [''])[-1]}"


def render(folder: Path, programs: Sequence[Program], failures: dict[str, str]) -> dict[str, str]:
    """Return every section of the page, and `all`, which says what each program took."""
    runs: dict[str, list[str]] = {}
    rows = []
    for program in programs:
        file = folder / f"{program.name}.json"
        found = facts.read_json(file) if file.exists() else None
        said = failures.get(program.name, "not measured at this commit")
        command = f"python -m benchmarks.{program.module} {program.arguments}".strip()
        missing = f"MISSING: `{command}`: {said}"
        runs.setdefault(program.module, []).append(page.figures(found) if found else missing)
        rows.append([program.name, *(_cells(found) if found else ["–", "–", f"MISSING: {said}"])])
    total = sum(facts.read_json(file)["seconds"] for file in folder.glob("*.json"))
    rows.append(["all", f"{total:.0f}", "–", "–"])
    times = facts.make_table("What each program took", ("program", "seconds", "load", "figures"), rows)
    return {name: page.section(name, said) for name, said in {"all": [page.table(times)], **runs}.items()}


def _cells(found: dict[str, Any]) -> list[str]:
    return [f"{found['seconds']:.0f}", page.load(found["machine"]).removeprefix("load "), f"of {found['commit']}"]


def measure_all(chosen: Sequence[Program], folder: Path, *, commit: str | None, quick: bool) -> dict[str, str]:
    """Run all programs that have not been, one after the other, and return by name why some have no figures."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = {program.name: measure(program, folder, commit=commit, quick=quick) for program in chosen}
    return {name: failure for name, failure in failures.items() if failure}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--programs",
        nargs="+",
        choices=[program.name for program in PROGRAMS],
        help="only these; of others, what is there",
    )
    parser.add_argument("--folder", type=Path, default=facts.ROOT / "runs" / "benchmarks", help="of commits' folders")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="the file between whose marks the tables go")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, of changed files too: for tests")
    options = parser.parse_args(arguments)
    commit = facts.commit()
    if commit is None or (commit.endswith(CHANGED) and not options.quick):
        parser.error(f"figures must be of a commit, and this is {commit or 'no repository'}: commit the changes first")
    if options.quick and options.page == page.PAGE:
        parser.error("--quick: its figures say nothing; choose another --page for them")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the program that runs, too
    folder = options.folder / (f"{commit}-quick" if options.quick else commit)
    chosen = [program for program in PROGRAMS if options.programs is None or program.name in options.programs]
    try:
        failures = measure_all(chosen, folder, commit=commit, quick=options.quick)
    except ChangedError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on with what is missing")
    text = page.rewrite(options.page.read_text(encoding="utf-8"), render(folder, PROGRAMS, failures))
    options.page.write_text(text, encoding="utf-8")
    print(f"{options.page}: tables of {commit}; JSON and logs in {folder}")
    if failures:
        sys.exit("missing: " + "; ".join(f"{name}: {failure}" for name, failure in failures.items()))


if __name__ == "__main__":
    main()
