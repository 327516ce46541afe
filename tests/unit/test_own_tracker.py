"""A tracker of the user's own: how a configuration names it, what it is given, and that it cannot end a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from rotexp.config.composition import to_config, to_plain
from rotexp.config.schema import Config
from rotexp.launch.command_line import register
from rotexp.runfolder.records import read_metrics, revived, truncate_metrics
from rotexp.testing import check_tracker
from rotexp.tracking.options import TrackerConfig, TrackerKind, WandbMode
from rotexp.tracking.recording import Trackers, open_trackers
from rotexp.tracking.tracker import TrackedRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "tensorboard"


class Recorder:
    """Keeps what it is given where the test sees it, and fails where it is told to."""

    opened: list[Recorder] = []  # noqa: RUF012

    def __init__(self, run: TrackedRun, *, fails: str = "", name: str = "mine") -> None:
        self.run, self.fails, self.run_id = run, fails, run.run_id or name
        self.calls: list[Any] = []
        Recorder.opened.append(self)
        self._do("open")

    def log(self, row: dict[str, float], *, step: int) -> None:
        self._do((step, dict(row)))
        row.clear()  # harms nobody

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        self._do((summary["status"], exit_code))

    def _do(self, call: Any) -> None:
        self.calls.append(call)
        if self.fails and (call == "open") is (self.fails == "open"):
            raise OSError("out of paper")


HERE = f"{__name__}.Recorder"


@pytest.fixture(autouse=True)
def none_opened() -> None:
    Recorder.opened.clear()


@pytest.fixture(scope="module")
def default() -> Config:
    return composed(EXAMPLE / "conf")


def live(trackers: Trackers) -> None:
    for step in (1, 2):
        trackers.log({"train/loss": 1.0 / step}, step=step)
    trackers.finish({"status": "failed"}, exit_code=1)


CALLS = ["open", (1, {"train/loss": 1.0}), (2, {"train/loss": 0.5}), ("failed", 1)]


@pytest.mark.parametrize(
    ("kind", "mode", "with_wandb"),
    [(None, "offline", False), ("jsonl", "offline", False), ("wandb", "offline", True), ("wandb", "disabled", False)],
)
def test_it_takes_the_place_of_wandb_unless_both_are_asked_for(
    kind: str | None, mode: str, with_wandb: bool, tmp_path: Path, default: Config
) -> None:
    chosen = TrackerKind[kind] if kind else None
    config = TrackerConfig(chosen, WandbMode[mode], "rotexp-tests", _target_=HERE, options={"name": "x"})
    run = TrackedRun(tmp_path, to_plain(replace(default, tracker=config)))
    live(open_trackers(config, run, rank=0))
    assert [recorder.calls for recorder in Recorder.opened] == [CALLS]
    assert Recorder.opened[0].run == run
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [1.0, 0.5]
    assert (tmp_path / "wandb").is_dir() is with_wandb


def test_only_rank_0_opens_it(tmp_path: Path) -> None:
    live(open_trackers(TrackerConfig(_target_=HERE), TrackedRun(tmp_path), rank=1))
    assert Recorder.opened == []


def test_a_resumed_run_is_told_its_step_and_its_name(tmp_path: Path) -> None:
    first = open_trackers(TrackerConfig(_target_=HERE), TrackedRun(tmp_path), rank=0)
    live(first)
    assert first.run_ids == {HERE: "mine"}
    logged_to = truncate_metrics(tmp_path, 1)
    run = TrackedRun(tmp_path, step=1, logged_to=logged_to)
    again = open_trackers(
        TrackerConfig(_target_=HERE, options={"name": "other"}), run, rank=0, run_ids={HERE: "mine", "wandb": "w"}
    )
    told = Recorder.opened[1].run
    assert (told.step, told.logged_to, told.run_id, again.run_ids) == (1, 2, "mine", {HERE: "mine"})
    assert [*told.history()] == [(1, {"train/loss": 1.0})]
    again.finish({"status": "done"}, exit_code=0)


@pytest.mark.parametrize(("fails", "calls"), [("open", CALLS[:1]), ("calls", CALLS)])
def test_whatever_it_raises_is_said_once_and_the_run_goes_on(
    fails: str, calls: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(open_trackers(TrackerConfig(_target_=HERE, options={"fails": fails}), TrackedRun(tmp_path), rank=0))
    assert Recorder.opened[0].calls == calls
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [1.0, 0.5]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"tracker {HERE}: out of paper; the run goes on, metrics.jsonl holds everything"]


def composed(folder: Path, *overrides: str, typed: Sequence[str] = ()) -> Config:
    register()
    search = f"hydra.searchpath=[file://{folder}]"
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        return to_config(compose("config", overrides=[search, *overrides]), typed=typed)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the events back by TensorBoard's own reader: every series' steps and values."""
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["tensors"] if not tag.endswith("/text_summary")]
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(tag)]
        for tag in tags
    }


def test_tensorboard_shows_a_resumed_run_as_its_metrics_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    config = composed(
        EXAMPLE / "conf",
        "tracker=tensorboard",
        "tracker.flush_secs=5",
        "plugins=[tensorboard_tracker]",
        typed=["tensorboard_tracker"],
    )
    assert (config.tracker.target, config.tracker.options) == ("tensorboard_tracker.TensorBoard", {"flush_secs": 5})
    plain = to_plain(config)
    for step, logged_to, last in ((0, -1, 3), (2, 3, 4)):
        assert truncate_metrics(tmp_path, step) == logged_to
        run = TrackedRun(tmp_path, plain, step=step, logged_to=logged_to)
        trackers = open_trackers(config.tracker, run, rank=0)
        for number in range(step + 1, last + 1):
            trackers.log({"train/loss": 1 / 3 + number + last, "train/tokens": 2.0**40 + number}, step=number)
        trackers.finish({"status": "done", "error": float("nan")}, exit_code=0)
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in revived(read_metrics(tmp_path)):
        at = row.pop("step")
        for key, value in row.items():
            expected.setdefault(key, []).append((at, value))
    assert scalars(tmp_path / "tensorboard") == expected
    assert [step for step, _ in expected["train/loss"]] == [1, 2, 3, 4]


def test_the_example_keeps_what_is_expected_of_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    sys.modules.pop("tensorboard_tracker", None)
    from tensorboard_tracker import TensorBoard  # type: ignore[import-not-found]

    check_tracker(TensorBoard, flush_secs=5, read_back=numbers)


def numbers(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    for key, values in scalars(folder / "tensorboard").items():
        yield from ((step, {key: value}) for step, value in values)
