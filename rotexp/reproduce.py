"""Run a recipe again and say which figures hold: `python -m rotexp.reproduce DIR_OR_FILE [key=value]`.

`--write FILE` writes a finished run as a recipe instead; `--noise N` measures its tolerances over N runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rotexp.process.arguments import Arguments, refuse
from rotexp.process.exit_codes import INTERRUPTED


def main() -> int:
    """Do what the command line asks for, and return the exit code."""
    parser = Arguments("rotexp.reproduce", __doc__)
    parser.add_argument("recipe", type=Path, metavar="DIR_OR_FILE", help="a finished run, or a file of recipes/")
    parser.add_argument("given", nargs="*", default=[], metavar="key=value", help="where texts lie, how it is spread")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write that run as a recipe, instead of running it")
    parser.add_argument("--noise", type=int, default=0, metavar="N", help="with --write: runs that measure tolerances")
    parser.add_argument("--about", metavar="TEXT", help="with --write: one sentence for people")
    asked = parser.parse_intermixed_args()
    from rotexp.recipes.reproducing import reproduce, write

    try:
        if asked.write is not None:
            return write(asked.recipe, asked.write, asked.given, noise=asked.noise, about=asked.about)
        if asked.noise or asked.about:
            parser.error("--noise and --about belong to --write FILE")
        return reproduce(asked.recipe, asked.given)
    except ValueError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
