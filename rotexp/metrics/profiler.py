"""Where a training step goes: a torch profiler trace of a few steps, and figures of the loop's parts and operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from rotexp.runfolder.layout import trace_file

PARTS = ("data", "forward", "backward", "consolidate", "clip", "optimizer", "metrics")
"""What a step consists of."""
PREFIX = "rotexp/"
PROFILED_STEPS = 3
OPERATORS = 12


@dataclass(frozen=True)
class PartFigures:
    """Of one part of the loop, or one operator without what it calls: milliseconds and calls, means of a step."""

    name: str
    host_ms: float
    device_ms: float
    calls: float
    operator: bool


def part(name: str) -> record_function:
    """Return a context that marks one of `PARTS` in profiles."""
    assert name in PARTS
    return record_function(PREFIX + name)


class StepProfiler:
    """Profiles up to three steps after one to warm up (fewer if a run has fewer), on every rank."""

    def __init__(self, folder: Path, *, rank: int, steps: int) -> None:
        self.trace = folder / trace_file(rank)
        self.figures: list[PartFigures] = []
        self.num_steps = min(PROFILED_STEPS, max(1, steps - 1))
        self._profile = profile(
            activities=_activities(),
            schedule=schedule(wait=0, warmup=1 if steps > 1 else 0, active=self.num_steps, repeat=1),
            on_trace_ready=self._finish,
        )

    def __enter__(self) -> StepProfiler:
        self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.stop()

    def step(self) -> None:
        """Say that a step has ended."""
        self._profile.step()

    def _finish(self, profiled: Any) -> None:
        profiled.export_chrome_trace(str(self.trace))
        self.figures = _figures(list(profiled.key_averages()), num_steps=self.num_steps)


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def _figures(events: Iterable[Any], *, num_steps: int) -> list[PartFigures]:
    """Return the loop's parts, then the costliest operators, each without what it calls."""
    by_name = {event.key: event for event in events}
    found = []
    for name in PARTS:
        if event := by_name.pop(PREFIX + name, None):
            times = (event.cpu_time_total, event.device_time_total)
            found.append(_scaled(name, *times, event.count, num_steps, operator=False))
    operators = [event for event in by_name.values() if not event.key.startswith(("ProfilerStep", PREFIX))]
    operators.sort(key=lambda event: event.self_device_time_total or event.self_cpu_time_total, reverse=True)
    for event in operators[:OPERATORS]:
        times = (event.self_cpu_time_total, event.self_device_time_total)
        found.append(_scaled(event.key, *times, event.count, num_steps, operator=True))
    return found


def _scaled(name: str, host_us: float, device_us: float, count: int, num_steps: int, *, operator: bool) -> PartFigures:
    scale = 1000 * num_steps
    return PartFigures(name, host_us / scale, device_us / scale, count / num_steps, operator)
