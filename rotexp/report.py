"""Compare runs: `python -m rotexp.report DIR…` prints tables and writes one HTML page, `--check` compares recipes."""

from __future__ import annotations

import sys

from rotexp.comparison.report import report
from rotexp.process.arguments import refuse


def main() -> int:
    """Report what the command line asks for, and return the exit code."""
    try:
        return report(sys.argv[1:])
    except ValueError as error:
        return refuse(error)


if __name__ == "__main__":
    sys.exit(main())
