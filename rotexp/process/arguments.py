"""The arguments of the small commands: wrong ones are answered by one line and exit code 2."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from rotexp.process.exit_codes import WRONG_REQUEST
from rotexp.process.saying import tell


class Arguments(argparse.ArgumentParser):
    """Reads arguments; flags are written whole."""

    def __init__(self, module: str, description: str | None) -> None:
        """Read the arguments of `python -m MODULE`; its description is the first line of a text."""
        super().__init__(prog=f"python -m {module}", description=(description or "").partition("\n")[0])
        self.allow_abbrev = False

    def error(self, message: str) -> NoReturn:
        """Exit as from a wrong request."""
        sys.exit(refuse(f"{message}; --help shows what is allowed"))


def refuse(reason: object) -> int:
    """Say in one line what was wrong with the request, and return the exit code."""
    tell(reason)
    return WRONG_REQUEST
