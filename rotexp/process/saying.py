"""What people are told: what is wrong on standard error, in lines that whoever started the process recognizes."""

from __future__ import annotations

import sys

PREFIX = "rotexp: "


def tell(reason: object) -> None:
    """Say something in one line."""
    sys.stderr.write(f"{PREFIX}{' '.join(str(reason).split())}\n")


def told(line: str) -> str | None:
    """Return what a line of standard error tells; None if it is another's."""
    return line.removeprefix(PREFIX).strip() if line.startswith(PREFIX) else None


def say(line: str) -> None:
    """Tell people something on standard output."""
    sys.stdout.write(f"{line}\n")
