"""On what a run computed: what decides, beside versions, which bits it gets."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from rotexp.quant.integer_products import has_integer_units

CPUINFO = Path("/proc/cpuinfo")
NUMBERS = {"cpu family": "family", "model": "model"}
"""What that file has beside a processor's name, and what it is called here."""


def machine() -> dict[str, Any]:
    """Return the processor, what of it torch uses, its cores, this process's threads, and the accelerator or `cpu`."""
    return {
        "cpu": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "integer_units": has_integer_units(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def processor(described: Path = CPUINFO) -> str:
    """Return the name of the processor with its family and model, as the system's file has them, or as Python knows it.

    Virtual machines may call processors alike for which libraries choose other kernels.
    """
    lines = described.read_text(encoding="utf-8", errors="replace").splitlines() if described.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    name = facts.get("model name", platform.processor() or platform.machine())
    return ", ".join([name, *(f"{key} {facts[fact]}" for fact, key in NUMBERS.items() if fact in facts)])
