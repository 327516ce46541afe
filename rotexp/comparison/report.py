"""One report: what the command line asks for, checked, written and shown."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rotexp.comparison.collect import Report, collect
from rotexp.comparison.page import page
from rotexp.comparison.table import to_csv, to_json
from rotexp.comparison.terminal import show
from rotexp.files.folders import write_atomically
from rotexp.process.arguments import Arguments
from rotexp.process.exit_codes import DONE, FAILED
from rotexp.process.saying import tell

PAGE_FILE = "report.html"
OWN_NAMES = "report."
"""How names begin that a report may have inside a run's folder."""

WRITERS = {"html": page, "csv": to_csv, "json": to_json}


def parser() -> Arguments:
    """Return what the command line may hold."""
    arguments = Arguments("rotexp.report", "Compare runs: prints tables and writes one HTML page.")
    arguments.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a run, or a folder that holds runs")
    arguments.add_argument("--html", metavar="FILE", type=Path, help=f"where the page goes (default: DIR/{PAGE_FILE})")
    arguments.add_argument("--csv", metavar="FILE", type=Path, help="also write the table of runs as CSV")
    arguments.add_argument("--json", metavar="FILE", type=Path, help="also write the table of runs as JSON")
    arguments.add_argument(
        "--check", metavar="RECIPE", type=Path, help="exit with 1 if a figure of this recipe, or of a folder's, moved"
    )
    return arguments


def report(arguments: Sequence[str]) -> int:
    """Carry out one command line, and return the exit code: 1 where a recipe does not hold, or has no run.

    Raises:
        ValueError: it is wrong; nothing was written then.
    """
    options = parser().parse_args(arguments)
    found = collect(options.folders, command=f"python -m rotexp.report {shlex.join(arguments)}")
    if options.check is not None:
        from rotexp.comparison.checking import check_recipes

        found = replace(found, checks=check_recipes(options.check, found.runs))
    targets = {
        "html": options.html or options.folders[0] / PAGE_FILE,
        "csv": options.csv,
        "json": options.json,
    }
    wanted = {name: target for name, target in targets.items() if target is not None}
    for name, target in wanted.items():
        check_target(target, found, flag=f"--{name}")
    for name, target in wanted.items():
        _write(target, WRITERS[name](found), flag=f"--{name}")
    show(found, written=list(wanted.values()))
    faults = [f"recipe {check.recipe}: {line}" for check in found.checks for line in check.faults]
    for line in faults:
        tell(line)
    return FAILED if faults else DONE


def check_target(target: Path, found: Report, *, flag: str) -> None:
    """Refuse a place for a file that would harm a run.

    Raises:
        ValueError: it is a folder, lies in none, or is a file of a run that no report wrote.
    """
    if target.is_dir():
        raise ValueError(f"{flag} {target}: is a folder; name a file in it")
    if not target.parent.is_dir():
        raise ValueError(f"{flag} {target}: {target.parent} is no folder; make it first")
    of_a_run = target.parent.resolve() in {run.folder for run in found.runs}
    if of_a_run and not target.name.startswith(OWN_NAMES):
        raise ValueError(f"{flag} {target}: lies in a run's folder; name it {OWN_NAMES}…, or choose another folder")


def _write(target: Path, text: str, *, flag: str) -> None:
    try:
        write_atomically(target, text)
    except OSError as error:
        raise ValueError(f"{flag} {target}: cannot be written ({error.strerror}); choose another place") from None
