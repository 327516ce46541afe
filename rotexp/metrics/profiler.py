"""Where a training step goes: a torch profiler trace of a few steps, and a table of the loop's parts and operators."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function, schedule

PARTS = ("data", "forward", "backward", "consolidate", "clip", "optimizer", "metrics")
"""What a step consists of."""
PREFIX = "rotexp/"
PROFILED_STEPS = 3
OPERATORS = 12


def part(name: str) -> record_function:
    """Return a context that marks one of `PARTS` in profiles."""
    assert name in PARTS
    return record_function(PREFIX + name)


class StepProfiler:
    """Profiles up to three steps after one to warm up (fewer if a run has fewer), on every rank."""

    def __init__(self, folder: Path, *, rank: int, steps: int) -> None:
        self.trace = folder / f"trace-rank-{rank}.json"
        self.table: Table | None = None
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
        self.table = _table(list(profiled.key_averages()), num_steps=self.num_steps)


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def _table(events: Iterable[Any], *, num_steps: int) -> Table:
    """Lay out milliseconds a step, on the host and on the device: the loop's parts, then the costliest operators."""
    by_name = {event.key: event for event in events}
    table = Table(title=f"where a step goes (mean of {num_steps})", title_justify="left")
    table.add_column("part")
    for column in ("host ms", "device ms", "calls"):
        table.add_column(column, justify="right")
    for name in PARTS:
        if event := by_name.pop(PREFIX + name, None):
            table.add_row(name, *_figures(event.cpu_time_total, event.device_time_total, event.count, num_steps))
    table.add_section()
    operators = [event for event in by_name.values() if not event.key.startswith(("ProfilerStep", PREFIX))]
    operators.sort(key=lambda event: event.self_device_time_total or event.self_cpu_time_total, reverse=True)
    for event in operators[:OPERATORS]:
        own = (event.self_cpu_time_total, event.self_device_time_total, event.count, num_steps)
        table.add_row(f"  {event.key} (itself)", *_figures(*own))
    return table


def _figures(host_us: float, device_us: float, count: int, num_steps: int) -> tuple[str, str, str]:
    scale = 1000 * num_steps
    return f"{host_us / scale:,.1f}", f"{device_us / scale:,.1f}", f"{count / num_steps:,.0f}"
