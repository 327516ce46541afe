"""`rotexp.testing.check_tracker` takes rotexp's trackers and the example, and finds what is wrong with others."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline_wandb import history

from rotexp.runfolder.records import MetricsFile, read_metrics, revived
from rotexp.testing import check_tracker
from rotexp.tracking.options import TrackerConfig, WandbMode
from rotexp.tracking.tracker import TrackedRun
from rotexp.tracking.wandb import open_mirror


class Sound:
    """A tracker that keeps what it is given, and calls a run by a name of its own."""

    def __init__(self, run: TrackedRun, *, name: str = "mine") -> None:
        self.run = run
        self.run_id: Any = run.run_id or name
        self.rows: list[dict[str, float]] = []

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        self.rows.append({**row, "step": step})

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        self.rows.clear()


class WithoutRun(Sound):
    def __init__(self, *, name: str = "mine") -> None:
        pass


class RefusesNaN(Sound):
    def log(self, row: Mapping[str, float], *, step: int) -> None:
        for value in row.values():
            if value != value:
                raise ValueError("no number")


class WantsOneRowAStep(Sound):
    def log(self, row: Mapping[str, float], *, step: int) -> None:
        if self.rows and self.rows[-1]["step"] == step:
            raise ValueError("steps must increase")
        super().log(row, step=step)


class WantsASummary(Sound):
    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        self.last = summary["evaluation"]


class ChangesRows(Sound):
    def log(self, row: Any, *, step: int) -> None:
        row["step"] = step


class ChangesTheSummary(Sound):
    def finish(self, summary: Any, *, exit_code: int) -> None:
        summary.pop("error")


class ForgetsItsName(Sound):
    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self.run_id = f"{run.step}"


class HasANumberForAName(Sound):
    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self.run_id = 7


class WritesMetrics(Sound):
    def log(self, row: Mapping[str, float], *, step: int) -> None:
        with (self.run.folder / "metrics.jsonl").open("a") as file:
            file.write("{}\n")


class ChangesTheFolder(Sound):
    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        os.chdir("/")


class DrawsFromPython(Sound):
    def log(self, row: Mapping[str, float], *, step: int) -> None:
        random.random()


class DrawsFromNumPy(Sound):
    def log(self, row: Mapping[str, float], *, step: int) -> None:
        np.random.rand()


class DrawsFromTorch(Sound):
    def log(self, row: Mapping[str, float], *, step: int) -> None:
        torch.rand(1)


class LeavesAThread(Sound):
    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        threading.Thread(target=ENDED.wait, args=(20,), name="writer").start()


ENDED = threading.Event()

BROKEN = {
    WithoutRun: "opening it: raised TypeError: ",
    RefusesNaN: r"log\(.*nan.* step=2\): raised ValueError: no number",
    WantsOneRowAStep: r"log\(.* step=0\): raised ValueError: steps must increase",
    WantsASummary: r"finish\(…, exit_code=1\): raised KeyError: 'evaluation'",
    ChangesRows: "row: was changed",
    ChangesTheSummary: "summary: was changed",
    ForgetsItsName: "run_id: was '0' and is '1' after resuming; go on with run.run_id",
    HasANumberForAName: "run_id=7: must be a text or None",
    WritesMetrics: r"metrics\.jsonl: was changed",
    ChangesTheFolder: "the working folder was changed",
    DrawsFromPython: "random numbers were drawn",
    DrawsFromNumPy: "random numbers were drawn",
    DrawsFromTorch: "random numbers were drawn",
    LeavesAThread: "threads writer are left after finish",
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(Path.cwd())
    ENDED.clear()
    yield
    ENDED.set()


def test_a_sound_tracker_is_taken_with_its_options() -> None:
    check_tracker(Sound, name="another")


def test_rotexps_own_are_taken_and_lose_nothing(caplog: pytest.LogCaptureFixture) -> None:
    check_tracker(in_a_folder_of_its_own, read_back=lambda folder: rows_of(read_metrics(folder / "mirror")))
    config = TrackerConfig(mode=WandbMode.offline, project="rotexp-tests")
    check_tracker(open_mirror, config=config, read_back=lambda folder: rows_of(history(folder)))
    warned = [record for record in caplog.records if record.name.startswith("rotexp.")]
    assert warned == [], "W&B's mirror says in a warning where it was given up"


def rows_of(rows: Iterable[Any]) -> Iterator[tuple[int, dict[str, float]]]:
    for row in revived([*rows]):
        yield row.pop("step"), row


@pytest.mark.parametrize("when", ["always", "resumed", "nan"])
def test_a_row_that_is_dropped_is_found_where_what_is_kept_can_be_read(when: str) -> None:
    def dropping(run: TrackedRun) -> Any:
        mirror = in_a_folder_of_its_own(run)
        log = mirror.log

        def log_some(row: Mapping[str, float], *, step: int) -> None:
            nan = any(value != value for value in row.values())
            if not {"always": True, "resumed": run.step == 0 and step == 1, "nan": nan}[when]:
                log(row, step=step)

        mirror.log = log_some  # type: ignore[method-assign]
        return mirror

    lost = "time/load_s=0.25 of step 0" if when == "always" else "train/loss=(3.25|nan), .* of step [12]"
    with pytest.raises(AssertionError, match=f"log: {lost} was not kept"):
        check_tracker(dropping, read_back=lambda folder: rows_of(read_metrics(folder / "mirror")))


def in_a_folder_of_its_own(run: TrackedRun) -> MetricsFile:
    """Return a second `metrics.jsonl`, since the run's is not a mirror's to write."""
    folder = run.folder / "mirror"
    folder.mkdir(exist_ok=True)
    return MetricsFile(folder)


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_what_is_wrong_is_found(cls: type[Sound]) -> None:
    with pytest.raises(AssertionError, match=BROKEN[cls]):
        check_tracker(cls)
