"""Compare runs: `python -m rotexp.report DIR…` prints tables and writes one HTML page."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rotexp.report.collect import Report, collect
from rotexp.tracking.files import write_atomically

DONE, WRONG_REQUEST = 0, 2
PAGE_FILE = "report.html"
OWN_NAMES = "report."
"""How names begin that a report may have inside a run's folder."""

LIBRARIES = ("plotly", "scipy")
"""What comes with `rotexp[report]` alone."""


class Arguments(argparse.ArgumentParser):
    """A parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{message}; see --help")


def parser() -> Arguments:
    """Return what the command line may hold."""
    arguments = Arguments(prog="python -m rotexp.report", description=__doc__, allow_abbrev=False)
    arguments.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a run, or a folder that holds runs")
    arguments.add_argument("--html", metavar="FILE", type=Path, help=f"where the page goes (default: DIR/{PAGE_FILE})")
    arguments.add_argument("--csv", metavar="FILE", type=Path, help="also write the table of runs as CSV")
    arguments.add_argument("--json", metavar="FILE", type=Path, help="also write the table of runs as JSON")
    return arguments


def report(arguments: Sequence[str]) -> None:
    """Carry out one command line.

    Raises:
        ValueError: it is wrong; nothing was written then.
    """
    options = parser().parse_args(arguments)
    found = collect(options.folders, command=f"python -m rotexp.report {shlex.join(arguments)}")
    targets = {
        "html": options.html or options.folders[0] / PAGE_FILE,
        "csv": options.csv,
        "json": options.json,
    }
    writers = _writers()
    wanted = {name: target for name, target in targets.items() if target is not None}
    for name, target in wanted.items():
        check_target(target, found, flag=f"--{name}")
    for name, target in wanted.items():
        _write(target, writers[name](found), flag=f"--{name}")
    from rotexp.report.terminal import show

    show(found, written=list(wanted.values()))


def _writers() -> dict[str, Callable[[Report], str]]:
    from rotexp.report.page import page
    from rotexp.report.table import to_csv, to_json

    return {"html": page, "csv": to_csv, "json": to_json}


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


def refuse(reason: str) -> NoReturn:
    """Say in one line what was wrong, and exit."""
    sys.stderr.write(f"rotexp: {' '.join(reason.split())}\n")
    sys.exit(WRONG_REQUEST)


def main() -> None:
    """Report what the command line asks for; a wrong request is answered in one line."""
    try:
        report(sys.argv[1:])
    except ValueError as error:
        refuse(str(error))
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library not in LIBRARIES:
            raise
        refuse(f"reports need {library}, which is not installed; pip install 'rotexp[report]'")
    sys.exit(DONE)


if __name__ == "__main__":
    main()
