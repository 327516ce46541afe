"""On what a run computed: what decides, beside versions, which bits it gets."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from rotexp.quant.integer_products import has_integer_units

CPUINFO = Path("/proc/cpuinfo")


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
    """Return the name of the processor, as the system's file has it, or else as Python knows it."""
    lines = described.read_text(encoding="utf-8", errors="replace").splitlines() if described.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
