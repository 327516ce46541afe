"""Compare runs: `python -m rotexp.report DIR…` prints tables and writes one HTML page."""

from __future__ import annotations

import sys

from rotexp.comparison.report import report
from rotexp.process.arguments import refuse
from rotexp.process.exit_codes import DONE


def main() -> int:
    """Report what the command line asks for, and return the exit code."""
    try:
        report(sys.argv[1:])
    except ValueError as error:
        return refuse(error)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
