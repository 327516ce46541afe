"""The run folder's files are whole and readable, metrics are defined ones, and W&B can fail or stall without harm."""

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from damaged import damaged
from safetensors.torch import save_file

from rotexp.files import folders
from rotexp.files.reading import UnreadableError
from rotexp.metrics.keys import METRICS, check_keys, find_metric
from rotexp.runfolder.records import (
    MetricsFile,
    finite,
    read_metrics,
    read_summary,
    readable_summary,
    revived,
    truncate_metrics,
    write_atomically,
    write_summary,
)
from rotexp.tracking import wandb as mirror
from rotexp.tracking.naming import mirrored_config
from rotexp.tracking.options import TrackerConfig, TrackerKind, WandbMode
from rotexp.tracking.recording import Trackers, open_trackers
from rotexp.tracking.tracker import TrackedRun
from rotexp.tracking.upload import replay
from rotexp.tracking.wandb import WandbMirror, resolve_mode

CONTRACT_METRICS = """
train/loss train/lr train/tokens grad_norm/total grad_norm/rotations grad_norm/weights
rotation/orthogonality_rrt_max rotation/orthogonality_rtr_max rotation/distance_from_init
replica/max_abs_diff replica/num_divergent
memory/peak_allocated_gib_max memory/peak_reserved_gib_min memory/peak_rss_gib_max memory/train/peak_rss_gib_min
throughput/tokens_per_s throughput/tokens_per_s_per_device throughput/mfu_pct time/step_s time/data_s time/sync_s
comm/num_collectives comm/bytes sync/num_unshards sync/num_barriers eval/trained/perplexity eval/quantized/kl
"""
PLAIN: dict[str, Any] = {
    "seed": 0,
    "model": {"name": "tiny", "path": None, "size": None},
    "quant": {"name": "w4a4"},
    "rotation": {"name": "learned"},
    "sharding": {"strategy": "full"},
    "sync_mode": {"mode": "off"},
    "launch": {"kind": "auto"},
    "tracker": {"kind": "wandb"},
}
"""As much of a configuration as W&B's names need; one written by an earlier version may have no more of the tracker."""

OFFLINE = TrackerConfig(mode=WandbMode.offline, project="rotexp-tests")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_row_is_one_object_and_numbers_that_are_not_finite_are_texts(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.log({"train/loss": 1.5, "train/tokens": 8}, step=1)
    assert rows(tmp_path) == [{"step": 1, "train/loss": 1.5, "train/tokens": 8}]  # readable at once
    metrics.log({"train/loss": math.nan, "train/lr": math.inf, "grad_norm/total": -math.inf}, step=2)
    metrics.finish({}, exit_code=0)
    assert rows(tmp_path)[1] == {"step": 2, "train/loss": "nan", "train/lr": "inf", "grad_norm/total": "-inf"}


def test_rows_are_appended_to_those_of_an_earlier_session(tmp_path: Path) -> None:
    for step in (1, 2):
        metrics = MetricsFile(tmp_path)
        metrics.log({"train/loss": 1.0}, step=step)
        metrics.finish({}, exit_code=0)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_finite_goes_through_nested_values_and_leaves_the_rest() -> None:
    values = {"a": [1.0, math.nan], "b": {"c": (math.inf, True, None, "text", 3)}, 4: -math.inf}
    plain = {"a": [1.0, "nan"], "b": {"c": ["inf", True, None, "text", 3]}, "4": "-inf"}
    assert finite(values) == plain
    back = revived(plain)
    assert math.isnan(back["a"].pop())
    assert back == {"a": [1.0], "b": {"c": [math.inf, True, None, "text", 3]}, "4": -math.inf}


def written(folder: Path, *steps: int, tail: str = "") -> Path:
    """Write a row a step, and some text after them; return the file."""
    metrics = MetricsFile(folder)
    for step in steps:
        metrics.log({"train/loss": 0.1 * step, "train/lr": math.nan}, step=step)
    metrics.finish({}, exit_code=0)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + tail)
    return path


@pytest.mark.parametrize("tail", ["", '{"step": 9, "train/lo', "\0\0", '{"step"', "17"])
def test_rows_after_a_step_and_a_last_line_cut_short_are_dropped(tmp_path: Path, tail: str) -> None:
    path = written(tmp_path, 0, 1, 2, 3, 3, tail=tail)
    whole = path.read_text().splitlines(keepends=True)
    assert truncate_metrics(tmp_path, 2) == 3
    assert path.read_text() == "".join(whole[:3])  # to the last digit
    assert truncate_metrics(tmp_path, 2) == 2
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_there_may_be_no_rows_to_drop(tmp_path: Path) -> None:
    assert truncate_metrics(tmp_path, 5) == -1
    assert list(tmp_path.iterdir()) == []
    written(tmp_path, 4)
    assert truncate_metrics(tmp_path, -1) == 4
    assert truncate_metrics(tmp_path, -1) == -1
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(
    "line", [b'{"train/loss": 1}', b"\0" * 40, b'{"step": 1, "tr', b"[]", b'"x"', b"\xff", b"[" * 9999]
)
def test_a_damaged_line_in_the_middle_is_named_passed_over_and_kept(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, 1)
    row = path.read_bytes()
    path.write_bytes(row + line + b'\n{"step": 2}\n{"step": 3}\n')
    before = path.read_bytes()
    assert truncate_metrics(tmp_path, 2) == 3
    assert path.read_bytes() == row + b'{"step": 2}\n'
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: line 2 of 4 cannot be read; the others are used"
    ]


def test_a_second_damage_is_kept_beside_the_first(tmp_path: Path) -> None:
    damages = [b'{"step": 1}\nfirst\n{"step": 2}\n', b'{"step": 1}\nsecond\n{"step": 2}\n', b'third\n{"step": 2}\n']
    for content in damages:
        (tmp_path / "metrics.jsonl").write_bytes(content)
        assert truncate_metrics(tmp_path, 2) == 2
        assert truncate_metrics(tmp_path, 2) == 2  # it is damaged no longer
    kept = [tmp_path / f"metrics.jsonl.damaged{suffix}" for suffix in ("", "-2", "-3")]
    assert [file.read_bytes() for file in kept] == damages
    assert sorted(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl", *kept]


def test_metrics_that_are_no_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read \(Is a directory\); restore it"):
        truncate_metrics(tmp_path, 1)


@damaged
def test_a_damaged_summary_is_named_with_what_is_wrong(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(UnreadableError) as end:
        read_summary(tmp_path)
    assert str(end.value) == f"{tmp_path}/summary.json: cannot be read ({reason}); restore it"
    assert readable_summary(tmp_path) == {}


def test_a_summary_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(UnreadableError, match=r"summary\.json: cannot be read \(Is a directory\); restore it"):
        read_summary(tmp_path)


def test_a_full_disk_leaves_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = written(tmp_path, 1, 2)
    before = path.read_text()
    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        truncate_metrics(tmp_path, 1)
    assert path.read_text() == before


def test_a_summary_is_read_back_and_replaced(tmp_path: Path) -> None:
    assert read_summary(tmp_path) == {}
    write_summary(tmp_path, {"status": "running", "error": None})
    write_summary(tmp_path, {"status": "done", "loss": math.nan})
    assert read_summary(tmp_path) == {"status": "done", "loss": "nan"}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_leaves_the_old_summary_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_summary(tmp_path, {"status": "running"})
    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_summary(tmp_path, {"status": "done"})
    assert read_summary(tmp_path) == {"status": "running"}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    seen: list[str] = []
    monkeypatch.setattr(folders.os, "fsync", lambda _descriptor: seen.append(path.read_text()))
    write_atomically(path, "new")
    assert seen == ["old"]
    assert path.read_text() == "new"


class Recorder:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ends: list[tuple[dict[str, Any], int]] = []

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        self.rows.append((step, dict(row)))

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        self.ends.append((dict(summary), exit_code))


def test_all_trackers_are_fed() -> None:
    recorders = [Recorder(), Recorder()]
    trackers = Trackers([*recorders])
    trackers.log({"train/loss": 1.0}, step=3)
    trackers.finish({"status": "done"}, exit_code=0)
    for recorder in recorders:
        assert recorder.rows == [(3, {"train/loss": 1.0})]
        assert recorder.ends == [({"status": "done"}, 0)]


@pytest.mark.parametrize(
    "key", ["train/los", "loss", "eval/trained/perplexity/extra", "memory/peak_rss_gib", "", "time/_s"]
)
def test_a_metric_that_is_not_defined_is_refused_and_recorded_nowhere(key: str) -> None:
    recorder = Recorder()
    with pytest.raises(KeyError, match=r"not defined in rotexp\.metrics\.keys"):
        Trackers([recorder]).log({"train/loss": 1.0, key: 1.0}, step=1)
    assert recorder.rows == []


def test_the_metric_names_of_the_contract_are_defined() -> None:
    check_keys(CONTRACT_METRICS.split())


def test_every_metric_has_one_definition_a_meaning_and_a_summary_wandb_knows() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.meaning and metric.summary in {"min", "max", "mean", "last"} for metric in METRICS)


@pytest.mark.parametrize(
    ("key", "name", "summary"),
    [
        ("train/loss", "train/loss", "min,last"),
        ("train/device_hours", "train/device_hours", "last"),
        ("time/step_s", "time/step_s", "mean,last"),
        ("time/merge_s", "time/<phase>_s", "last"),
        ("memory/peak_rss_gib_max", "memory/peak_rss_gib_max", "max,last"),
        ("memory/train/peak_rss_gib_max", "memory/<phase>/peak_rss_gib_max", "max,last"),
        ("eval/trained/perplexity", "eval/<row>/perplexity", "min,last"),
        ("eval/trained/top1_agreement", "eval/<row>/top1_agreement", "max,last"),
    ],
)
def test_a_series_is_summarized_by_what_tells_most_of_it_and_its_last(key: str, name: str, summary: str) -> None:
    metric = find_metric(key)
    assert metric is not None
    assert (metric.name, metric.wandb_summary) == (name, summary)
    assert find_metric(f"{key}/extra") is None


@pytest.mark.parametrize(("rank", "names"), [(0, ["MetricsFile"]), (1, [])])
def test_only_rank_0_records(tmp_path: Path, rank: int, names: list[str]) -> None:
    trackers = open_trackers(TrackerConfig(kind=TrackerKind.jsonl), TrackedRun(tmp_path, PLAIN), rank=rank)
    assert [type(tracker).__name__ for tracker in trackers._trackers] == names
    assert (tmp_path / "metrics.jsonl").exists() is (rank == 0)
    trackers.finish({}, exit_code=0)


def test_a_disabled_mirror_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("W&B was opened"))
    config = TrackerConfig(mode=WandbMode.disabled)
    open_trackers(config, TrackedRun(tmp_path, PLAIN), rank=0).finish({}, exit_code=0)


class FakeRun:
    """Stands for a W&B run; `log` does what it is told."""

    def __init__(self, log: Callable[[], object] = lambda: None) -> None:
        self.summary: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.metrics: dict[str, str | None] = {}
        self.exit_codes: list[int] = []
        self.artifacts: list[Any] = []
        self.id = "run1"
        self._log = log

    def define_metric(self, name: str, *, step_metric: str, step_sync: bool, summary: str | None) -> None:
        assert (step_metric, step_sync) == ("_step", False)
        assert name not in self.metrics
        self.metrics[name] = summary

    def log(self, row: dict[str, float], *, step: int) -> None:
        self._log()
        self.rows.append((step, row))

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def finish(self, *, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def open_mirror(folder: Path) -> WandbMirror:
    return WandbMirror(OFFLINE, folder, plain_config=PLAIN)


def live(opened: WandbMirror) -> None:
    """Use a mirror as a run does."""
    for step in (1, 2, 3):
        opened.log({"train/loss": 1.0}, step=step)
    opened.finish({"status": "done", "loss": math.nan}, exit_code=0)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event that ends every call which stalls on it, at the latest when the test is over."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name == "wandb":
            thread.join(5)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fail() -> None:
    raise RuntimeError("no such host")


def test_a_mirror_passes_everything_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, given = FakeRun(), {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or run)
    live(open_mirror(tmp_path))
    assert [step for step, _ in run.rows] == [1, 2, 3]
    assert run.summary == {"status": "done", "loss": "nan"}
    assert run.exit_codes == [0]
    assert run.metrics == {"train/loss": "min,last"}
    assert run.artifacts == []  # there is no file of rotations
    assert (given["dir"], given["mode"], given["config"]) == (tmp_path, "offline", mirrored_config(PLAIN))
    assert given["name"] == "tiny-w4a4-learned-full-off-seed0"
    assert (given["id"], given["resume"]) == (None, None)


def test_a_failing_start_is_said_once_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb, "init", lambda **_: fail())
    live(open_mirror(tmp_path))
    (warning,) = warnings_of(caplog)
    assert "no such host" in warning
    assert "metrics.jsonl holds everything" in warning


@pytest.mark.parametrize("method", ["log", "finish", "define_metric"])
def test_a_failing_call_is_said_once_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    run = FakeRun()
    calls: list[str] = []

    def failing(*_: object, **__: object) -> None:
        calls.append(method)
        fail()

    setattr(run, method, failing)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    live(open_mirror(tmp_path))
    assert calls == [method] * (3 if method == "log" else 1)
    assert len(warnings_of(caplog)) == 1
    assert len(run.rows) == (0 if method == "log" else 3)
    assert run.summary["status"] == "done"
    assert run.exit_codes == ([] if method == "finish" else [0])


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_one_failing_row_loses_that_row_alone(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = iter(range(1, 9))
    run = FakeRun(log=lambda: fail() if next(count) == failing else None)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    save_file({"R1": torch.eye(4)}, tmp_path / "rotations.safetensors")
    opened = open_mirror(tmp_path)
    live(opened)
    assert [step for step, _ in run.rows] == [step for step in (1, 2, 3) if step != failing]
    assert (run.summary["status"], run.exit_codes, len(run.artifacts)) == ("done", [0], 1)
    assert opened.run_id == "run1"
    (warning,) = warnings_of(caplog)
    again = f"python -m rotexp.upload --rebuild {tmp_path} sends it anew"
    assert (
        warning == f"W&B: no such host; what it did not take is missing there, metrics.jsonl holds everything, {again}"
    )


def test_a_mirror_that_answers_again_is_given_every_row_and_holds_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: threading.Event
) -> None:
    run = FakeRun(log=lambda: release.wait(10))
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    opened = open_mirror(tmp_path)
    for step in (1, 2, 3):
        opened.log({"train/loss": 1.0}, step=step)
    assert run.rows == []  # the first call hangs, and nobody waits for it
    release.set()
    opened.finish({"status": "done"}, exit_code=0)
    assert [step for step, _ in run.rows] == [1, 2, 3]
    assert (run.exit_codes, warnings_of(caplog)) == ([0], [])


@pytest.mark.parametrize(("mode", "tried"), [("online", ["online", "offline"]), ("offline", ["offline"])])
def test_a_run_that_cannot_be_opened_online_is_recorded_offline(
    mode: str,
    tried: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, modes = FakeRun(), []

    def init(*, mode: str, **_: object) -> FakeRun:
        modes.append(mode)
        return run if len(modes) == 2 else fail()  # type: ignore[func-returns-value]

    monkeypatch.setattr(wandb, "init", init)
    live(WandbMirror(TrackerConfig(mode=WandbMode[mode]), tmp_path, plain_config=PLAIN))
    assert modes == tried
    (warning,) = warnings_of(caplog)
    if mode == "online":
        assert warning == f"W&B: no such host; recorded offline, python -m rotexp.upload {tmp_path} uploads it"
        assert ([step for step, _ in run.rows], run.exit_codes) == ([1, 2, 3], [0])
    else:
        assert warning.startswith("W&B: no such host; the run goes on without it, metrics.jsonl holds everything")


def test_an_upload_that_only_recorded_offline_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.resolved.yaml").write_text(yaml.safe_dump(PLAIN))
    write_summary(tmp_path, {"status": "done"})
    for modes_that_fail, run_id in ((["online"], None), ([], "run1")):
        monkeypatch.setattr(wandb, "init", lambda *, mode, no=modes_that_fail, **_: fail() if mode in no else FakeRun())
        assert replay(tmp_path, mode=WandbMode.online) == run_id


def test_offline_runs_stay_where_not_all_of_them_could_be_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = tmp_path / "wandb" / "offline-run-1-abc"
    earlier.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    for log, left in ((fail, True), (lambda: None, False)):
        monkeypatch.setattr(wandb, "init", lambda log=log, **_: FakeRun(log=log))
        open_trackers(OFFLINE, TrackedRun(tmp_path, PLAIN), rank=0).finish({}, exit_code=0)
        assert earlier.exists() is left


def test_a_start_that_stalls_is_given_up_even_if_it_answers_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: threading.Event
) -> None:
    run = FakeRun(log=fail)
    monkeypatch.setattr(mirror, "INIT_SECONDS", 0.02)
    monkeypatch.setattr(wandb, "init", lambda **_: release.wait(10) and run)
    opened = open_mirror(tmp_path)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "wandb":
            thread.join(5)
    live(opened)
    (warning,) = warnings_of(caplog)
    assert "no answer within" in warning


def test_a_call_that_stalls_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: threading.Event
) -> None:
    run = FakeRun(log=lambda: release.wait(10))
    monkeypatch.setattr(mirror, "FINISH_SECONDS", 0.05)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    live(open_mirror(tmp_path))
    assert run.rows == []
    assert len(warnings_of(caplog)) == 1


def test_the_other_trackers_get_every_row_while_the_mirror_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "init", lambda **_: FakeRun(log=fail))
    trackers = open_trackers(OFFLINE, TrackedRun(tmp_path, PLAIN), rank=0)
    for step in (1, 2):
        trackers.log({"train/loss": 1.0}, step=step)
    trackers.finish({}, exit_code=0)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without a W&B key; returns the place of its netrc file."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("prompted"))
    return netrc


def test_without_a_key_the_run_is_offline(no_key: Path) -> None:
    assert resolve_mode(WandbMode.auto) == "offline"


def test_with_a_key_in_the_environment_it_is_online(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve_mode(WandbMode.auto) == "online"


@pytest.mark.parametrize(("machine", "mode"), [("api.wandb.ai", "online"), ("example.org", "offline")])
def test_with_a_key_in_netrc_it_is_online(no_key: Path, machine: str, mode: str) -> None:
    no_key.write_text(f"machine {machine}\n  login user\n  password {'x' * 40}\n")
    no_key.chmod(0o600)
    assert resolve_mode(WandbMode.auto) == mode


def test_wandbs_own_variable_decides_auto_and_nothing_else(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode(WandbMode.auto) == "disabled"
    assert resolve_mode(WandbMode.offline) == "offline"
    assert resolve_mode(WandbMode.online) == "online"


def test_an_offline_run_is_written_into_the_folder(
    no_key: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    live(WandbMirror(TrackerConfig(mode=WandbMode.auto), folder, plain_config=PLAIN))
    (run_folder,) = (folder / "wandb").glob("offline-run-*")
    (record,) = run_folder.glob("*.wandb")
    assert record.stat().st_size > 0
    assert warnings_of(caplog) == []
    assert capfd.readouterr() == ("", "")
