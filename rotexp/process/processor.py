"""Which processor this is; needs no torch."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
NUMBERS = {"cpu family": "family", "model": "model"}
"""What that file has beside a processor's name, and what it is called here."""


def processor(described: Path = CPUINFO) -> str:
    """Return the name of the processor with its family and model, as the system's file has them, or as Python knows it.

    Virtual machines may call processors alike for which libraries choose other kernels.
    """
    lines = described.read_text(encoding="utf-8", errors="replace").splitlines() if described.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    name = facts.get("model name", platform.processor() or platform.machine())
    return ", ".join([name, *(f"{key} {facts[fact]}" for fact, key in NUMBERS.items() if fact in facts)])
