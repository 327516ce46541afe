"""How much memory this machine has left; needs no torch."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Return what programs can still be given without swapping, as Linux says; None on another system.

    A container's own limit is not looked at.
    """
    facts = Path("/proc/meminfo")
    if not facts.is_file():
        return None
    line = next(line for line in facts.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
