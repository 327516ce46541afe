"""Upload recorded runs to W&B: `python -m rotexp.upload DIR… [--rebuild]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rotexp.process.arguments import Arguments, refuse
from rotexp.process.exit_codes import INTERRUPTED


def main() -> int:
    """Upload what the command line names, and return the exit code."""
    parser = Arguments("rotexp.upload", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of runs, or of sweeps")
    parser.add_argument("--rebuild", action="store_true", help="make new W&B runs from metrics.jsonl and summary.json")
    arguments = parser.parse_args()
    from rotexp.tracking.upload import upload

    try:
        return upload(arguments.folders, rebuild=arguments.rebuild)
    except ValueError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
