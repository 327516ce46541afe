"""What a person sees of a run while it goes on."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rotexp.tracking import console as console_module
from rotexp.tracking.console import StartUp, TrainingProgress, duration, startup_panel


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress reads, in seconds; a test moves it on."""
    now = [100.0]
    monkeypatch.setattr(console_module.time, "perf_counter", lambda: now[0])
    return now


def plain() -> Console:
    return Console(file=io.StringIO(), width=100)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None, legacy_windows=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(loss: float = 2.0, rate: float = 1234.0, **memory: float) -> dict[str, float]:
    return {"train/loss": loss, "throughput/tokens_per_s": rate, **memory}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (7100, "118 min"), (7200, "2.0 h"), (100_000, "27.8 h")],
)
def test_a_duration_is_said_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_off_a_terminal_steps_are_plain_lines_with_rate_and_time_left(clock: list[float]) -> None:
    console = plain()
    with TrainingProgress(console, steps=4) as progress:
        for step in range(1, 5):
            clock[0] += 10
            progress.show(step, row(step / 2))
    assert text_of(console).splitlines() == [
        "step 1/4  loss 0.5000  1,234 tokens/s  30 s left",
        "step 2/4  loss 1.0000  1,234 tokens/s  20 s left",
        "step 3/4  loss 1.5000  1,234 tokens/s  10 s left",
        "step 4/4  loss 2.0000  1,234 tokens/s  0 s left",
    ]


def test_utilization_is_shown_where_a_device_has_one() -> None:
    console = plain()
    with TrainingProgress(console, steps=1) as progress:
        progress.show(1, row() | {"throughput/mfu_pct": 41.26, "memory/peak_allocated_gib_max": 3.0})
    assert "1,234 tokens/s  MFU 41.3 %  3.00 GiB" in text_of(console)


def test_many_steps_are_shown_in_few_lines_the_first_and_the_last_among_them() -> None:
    console = plain()
    with TrainingProgress(console, steps=1003, lines=10) as progress:
        for step in range(1, 1004):
            progress.show(step, row())
    shown = [int(step) for step in re.findall(r"^step (\d+)/1003", text_of(console), re.MULTILINE)]
    assert shown == [1, *range(101, 1003, 101), 1003]


def test_a_resumed_run_counts_its_own_steps_for_the_time_left(clock: list[float]) -> None:
    console = plain()
    with TrainingProgress(console, steps=100, done=90) as progress:
        clock[0] += 2
        progress.show(91, row())
    assert text_of(console) == "step 91/100  loss 2.0000  1,234 tokens/s  18 s left\n"


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        ({"memory/peak_rss_gib_max": 1.5}, "1.50 GiB"),
        ({"memory/peak_rss_gib_max": 1.5, "memory/peak_allocated_gib_max": 0.25}, "0.25 GiB"),
    ],
)
def test_memory_is_that_of_the_accelerator_where_there_is_one(memory: dict[str, float], shown: str) -> None:
    console = plain()
    with TrainingProgress(console, steps=1) as progress:
        progress.show(1, row(**memory))
    assert f"tokens/s  {shown}  " in text_of(console)


def test_on_a_terminal_phases_and_steps_have_bars(clock: list[float]) -> None:
    console = terminal()
    with TrainingProgress(console, steps=8, phases=["load", "train", "save"]) as progress:
        progress.phase("load")
        clock[0] += 1000
        progress.phase("train")
        clock[0] += 3
        progress.show(2, row(**{"memory/peak_rss_gib_max": 1.5}))
        progress._bars.refresh()
        shown = text_of(console)
        progress.phase("save")
    assert "step 2/8" not in shown  # no plain lines among the bars
    run = [line for line in shown.splitlines() if "run" in line][-1]
    train = [line for line in shown.splitlines() if "2/8" in line][-1]
    assert re.search(r"run +\S+.* 1/3 +train", run)
    assert re.search(r"train +\S+.* 2/8 +loss 2.0000  1,234 tokens/s  1.50 GiB  9 s left", train)  # loading not counted
    assert re.search(r" 2/3 +save", text_of(console))


def test_off_a_terminal_a_phase_is_not_a_line() -> None:
    console = plain()
    with TrainingProgress(console, steps=0, phases=["load"]) as progress:
        progress.phase("load")
    assert text_of(console) == ""


def shown_panel(**changes: Any) -> list[str]:
    facts: dict[str, Any] = {
        "model": "tiny",
        "parameters": 4_000_000,
        "sharding": "full: 20 sharded, 1 ignored",
        "devices": "2 x cpu",
        "tokens_per_step": 2048,
        "steps": 1000,
        "folder": Path("runs/x"),
    }
    console = plain()
    console.print(startup_panel(StartUp(**facts | changes)))
    return [" ".join(line.strip("│╭╮╰╯─ ").split()) for line in text_of(console).splitlines()]


def test_the_start_shows_model_sharding_devices_tokens_steps_and_folder() -> None:
    assert shown_panel() == [
        "rotexp",
        "model tiny, 4,000,000 parameters",
        "sharding full: 20 sharded, 1 ignored",
        "devices 2 x cpu",
        "tokens 2,048 a step, 2,048,000 in all",
        "steps 1,000; the first says how long they take",
        "folder runs/x",
        "",
    ]


def test_a_measured_step_says_how_long_all_take() -> None:
    assert "steps 1,000, about 8 min" in shown_panel(step_seconds=0.5)


def test_brackets_in_names_are_shown_as_they_are() -> None:
    assert "model [bold]x, 4,000,000 parameters" in shown_panel(model="[bold]x")
    assert "folder runs/[red]" in shown_panel(folder=Path("runs/[red]"))
