"""On what a run computed: what decides, beside versions, which bits it gets."""

from __future__ import annotations

import os
from typing import Any

import torch

from rotexp.process.processor import processor
from rotexp.quant.integer_products import has_integer_units


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
