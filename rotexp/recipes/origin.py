"""Of which commit of rotexp a recipe is."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import rotexp

CHANGED = "-changed"
DECIDING = ("rotexp", "conf")
"""What decides a run's figures."""


def commit_of(root: Path = Path(rotexp.__file__).parents[1], *, deciding: Sequence[str] = DECIDING) -> str | None:
    """Return the commit of a checkout, with `CHANGED` behind it if what decides figures differs; None without one.

    Args:
        deciding: paths within it, as git takes them.
    """
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return name + (CHANGED if _git(root, "status", "--porcelain", "--", *deciding) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], check=True, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()
