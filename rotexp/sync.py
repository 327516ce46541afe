"""What `python -m rotexp.upload` was called before: answers as that does, and says so."""

from __future__ import annotations

import sys

from rotexp.process.saying import tell
from rotexp.upload import main as upload


def main() -> int:
    """Upload what the command line names, and return the exit code."""
    tell("rotexp.sync is now called rotexp.upload")
    return upload()


if __name__ == "__main__":
    sys.exit(main())
