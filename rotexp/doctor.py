"""Say what a run would find on this machine: `python -m rotexp.doctor [--strict]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from rotexp.launch.readiness import checks_table, look
from rotexp.process.arguments import Arguments


def main() -> int:
    """Look, print the table, and return the exit code."""
    parser = Arguments("rotexp.doctor", __doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a run with the defaults lacks something")
    arguments = parser.parse_args()
    checks = list(look(Path.cwd()))
    Console(highlight=False).print(checks_table(checks))
    return int(arguments.strict and any(check.needed and check.remedy for check in checks))


if __name__ == "__main__":
    sys.exit(main())
