"""Peak memory of a rank's process and of its accelerator, since the last reset."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

GIB = 2**30
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK_RSS = "5"


def reset_peaks(device: torch.device) -> None:
    """Start measuring anew; where the system cannot reset the resident peak it stays that of the whole process."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peaks(device: torch.device) -> dict[str, float]:
    """Return `peak_rss_gib`, and on an accelerator `peak_allocated_gib` and `peak_reserved_gib`, in GiB."""
    figures = {"peak_rss_gib": peak_rss_bytes() / GIB}
    if device.type == "cuda":
        figures["peak_allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        figures["peak_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return figures


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process in bytes."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
