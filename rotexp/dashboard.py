"""Build the W&B workspace that compares runs: `python -m rotexp.dashboard [project=…] [entity=…] [name=…] [out=FILE]`.

It is saved when somebody is logged in; `out=FILE` writes it as JSON.
"""

from __future__ import annotations

import sys

from rotexp.process.arguments import Arguments, refuse
from rotexp.tracking.dashboard import DEFAULTS, dashboard, read_settings


def main() -> int:
    """Build what the command line asks for, and return the exit code."""
    parser = Arguments("rotexp.dashboard", __doc__)
    parser.add_argument("settings", nargs="*", metavar="key=value", help=f"of {', '.join(DEFAULTS)}")
    arguments = parser.parse_args()
    try:
        return dashboard(read_settings(arguments.settings))
    except ValueError as error:
        return refuse(error)


if __name__ == "__main__":
    sys.exit(main())
