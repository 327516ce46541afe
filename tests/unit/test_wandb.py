"""The W&B run of a folder: its name and configuration, what its records hold, how it is resumed and rebuilt."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from offline_wandb import history, records
from safetensors.torch import save_file

from rotexp.config.components import Component
from rotexp.config.composition import to_plain
from rotexp.config.schema import Config
from rotexp.data.options import DataConfig, DataSource
from rotexp.launch.options import LaunchConfig, LaunchKind
from rotexp.metrics.rotations import rotation_metrics, rotation_rows
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.orthogonal.stiefel import orthogonality_error
from rotexp.quant.options import QuantConfig
from rotexp.rotation.options import RotationConfig
from rotexp.runfolder.records import truncate_metrics, write_summary
from rotexp.sharding.options import ShardingConfig, SyncConfig, SyncMode
from rotexp.tracking import upload
from rotexp.tracking.naming import (
    artifact_name,
    axes_name,
    display_name,
    mirrored_config,
    place_in_group,
    tags,
)
from rotexp.tracking.options import TrackerConfig, TrackerKind, WandbMode
from rotexp.tracking.recording import Trackers, open_trackers
from rotexp.tracking.short_names import shortened
from rotexp.tracking.tracker import TrackedRun
from rotexp.tracking.upload import find_runs, replay
from rotexp.tracking.wandb import WandbMirror

SPECIAL = set("= ,{}%#$")


def configured(**changes: Any) -> Config:
    """Return a whole configuration, as Hydra would compose it."""
    parts: dict[str, Any] = {
        "model": ModelConfig("tiny", ModelSource.tiny),
        "data": DataConfig("builtin", DataSource.builtin),
        "quant": QuantConfig("w4a4"),
        "rotation": RotationConfig("learned_r4"),
        "optimizer": {"name": "cayley_sgd", "lr": 0.1},
        "objective": Component("ce", "rotexp.training.objectives.CrossEntropy"),
        "sharding": ShardingConfig("hybrid_zero2"),
        "sync_mode": SyncConfig(SyncMode.universal),
        "launch": LaunchConfig(LaunchKind.elastic),
        "tracker": TrackerConfig(mode=WandbMode.offline, project="rotexp-tests"),
    }
    return Config(**parts | changes)


def config_of(folder: Path) -> dict[str, Any]:
    (run,) = records(folder, "run")
    return {item.key: json.loads(item.value_json) for item in run.config.update if not item.key.startswith("_")}


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the last value of every key of the summary."""
    updates = [item for record in records(folder, "summary") for item in record.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


ROWS = rotation_rows({"R1": torch.eye(4), "R2_0": torch.eye(2)}, {"R1": torch.eye(4), "R2_0": torch.eye(2)})
END = {"status": "done", "evaluation": {"trained": {"perplexity": math.inf}}, "rotations": ROWS}


def recorded(folder: Path, config: Config, *, end: dict[str, Any] = END, steps: int = 3) -> Trackers:
    """Leave a folder as a run does, trackers closed."""
    folder.mkdir(exist_ok=True)
    plain = to_plain(config)
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump({"defaults": ["schema"], **plain}))
    trackers = open_trackers(config.tracker, TrackedRun(folder, plain), rank=0)
    trackers.log({"eval/float/perplexity": 2.0, "time/load_s": 0.5}, step=0)
    for step in range(1, steps + 1):
        trackers.log({"train/loss": math.nan if step == 2 else 1 / step, "train/tokens": 8 * step}, step=step)
    trackers.log({"eval/trained/perplexity": 3.0, "memory/train/peak_rss_gib_max": 0.25}, step=steps)
    save_file({"R1": torch.eye(4)}, folder / "rotations.safetensors")
    trackers.finish(end, exit_code=0 if end["status"] == "done" else 1)
    write_summary(folder, end)
    return trackers


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for what W&B keeps outside the run's folder, and an environment without a key."""
    place = tmp_path / "home"
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(place))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    return place


def test_a_name_says_the_axes_and_nothing_else() -> None:
    plain = to_plain(configured())
    assert axes_name(plain) == "tiny-w4a4-learned_r4-hybrid_zero2-universal-seed0"
    assert display_name(plain, folder="20-15-12-ab12") == axes_name(plain)
    assert axes_name(to_plain(configured(adamw=Config().adamw, seed=3))) == axes_name(plain)[:-1] + "3"


@pytest.mark.parametrize(
    ("model", "start"),
    [
        (ModelConfig("hf", ModelSource.hf, path="some/dir/My model=1,{2}%#$"), "hf-My_model_1_2-w4a4-"),
        (ModelConfig("smollm2_135m", ModelSource.hf, path="HuggingFaceTB/SmolLM2-135M"), "smollm2_135m-w4a4-"),
        (ModelConfig("random_llama", ModelSource.random, size="1b"), "random_llama-1b-w4a4-"),
        (ModelConfig("hf", ModelSource.hf, path="x" * 500), "hf-xxx"),
    ],
)
def test_a_name_says_which_model_without_special_characters(model: ModelConfig, start: str) -> None:
    name = axes_name(to_plain(configured(model=model)))
    assert name.startswith(start)
    assert not SPECIAL & set(name)
    assert len(name) <= 128


def test_the_jobs_of_a_group_are_told_apart_by_their_folders() -> None:
    plain = to_plain(configured(tracker=TrackerConfig(group="sweep")))
    assert display_name(plain, folder="lr=0.1, x") == f"{axes_name(plain)}-lr_0.1_x"
    long = to_plain(configured(tracker=TrackerConfig(group="sweep"), model=ModelConfig("hf", path="x" * 500)))
    assert display_name(long, folder="17").endswith("x-17")
    assert len(display_name(long, folder="17")) == 128


def test_names_that_are_too_long_are_cut_and_stay_apart() -> None:
    one, other = (
        to_plain(configured(model=ModelConfig("hf", path="x" * 200 + end), quant=QuantConfig("q" * 80 + end)))
        for end in "ab"
    )
    assert len(axes_name(one)) == len(axes_name(other)) == 128
    assert axes_name(one) != axes_name(other)
    assert axes_name(one) == axes_name(one)
    assert all(len(tag) <= 64 for tag in tags(one))
    assert set(tags(one)) != set(tags(other))
    group = to_plain(configured(tracker=TrackerConfig(group="sweep")))
    first, second = (display_name(group, folder="y" * 250 + end) for end in "ab")
    assert (len(first), len(second), first == second) == (128, 128, False)


@pytest.mark.parametrize(
    ("folder", "group", "place"),
    [
        ("/x/sweep/seed-0", "sweep", "seed-0"),
        ("/x/sweep/a/0", "sweep", "a/0"),
        ("/x/sweep/a/0", "mine", "0"),
        ("/x/sweep/a/0", None, "0"),
        (f"/x/{'s' * 200}/a/0", shortened("s" * 200, 128), "a/0"),
    ],
)
def test_a_job_is_called_by_its_place_below_the_folder_of_its_group(folder: str, group: str | None, place: str) -> None:
    assert place_in_group(Path(folder), group) == place


@pytest.mark.parametrize("run_id", ["abc", "a b&c", "é" * 128, "x" * 128])
def test_an_artifact_has_a_name_that_wandb_takes_whatever_the_run_is_called(run_id: str) -> None:
    assert wandb.Artifact(artifact_name(run_id, kind="rotations"), type="rotations").name.startswith("rotations")


def test_a_run_whose_options_wandb_would_not_take_is_not_uploaded_and_says_why(tmp_path: Path) -> None:
    recorded(tmp_path / "run", configured(tracker=TrackerConfig(kind=TrackerKind.jsonl, project="team/x")))
    with pytest.raises(ValueError, match=r"tracker\.project=team/x: must be without / .*; set tracker\.entity=team"):
        replay(tmp_path / "run", mode=WandbMode.offline)
    assert not (tmp_path / "run" / "wandb").exists()


def test_tags_are_those_given_and_the_options_each_once() -> None:
    plain = to_plain(configured(tracker=TrackerConfig(tags=["paper", "paper", "quant:w4a4"])))
    options = ["sharding:hybrid_zero2", "sync:universal", "rotation:learned_r4"]
    assert tags(plain) == ["paper", "quant:w4a4", *options]


def test_every_group_has_a_name_to_filter_by_and_every_value_is_kept() -> None:
    plain = to_plain(configured())
    mirrored = mirrored_config(plain)
    names = {
        group: values["name"] for group, values in mirrored.items() if isinstance(values, dict) and "name" in values
    }
    assert names == {
        "model": "tiny",
        "data": "builtin",
        "quant": "w4a4",
        "rotation": "learned_r4",
        "optimizer": "cayley_sgd",
        "objective": "ce",
        "sharding": "hybrid_zero2",
        "sync_mode": "universal",
        "launch": "elastic",
        "tracker": "wandb",
    }
    assert mirrored["sharding"].pop("by_model") == "tiny hybrid_zero2"
    for group in ("sharding", "sync_mode", "launch", "tracker"):
        assert "name" not in plain[group]  # the run's own configuration is as it was
        del mirrored[group]["name"]
    assert mirrored == plain


def test_an_offline_run_holds_group_names_config_metrics_table_and_artifact(home: Path, tmp_path: Path) -> None:
    tracker = TrackerConfig(mode=WandbMode.offline, project="p", entity="e", group="g", job_type="j", tags=["t"])
    config = configured(tracker=tracker)
    folder = tmp_path / "7"
    trackers = recorded(folder, config)
    (run,) = records(folder, "run")
    assert (run.project, run.entity, run.run_group, run.job_type) == ("p", "e", "g", "j")
    assert run.display_name == "tiny-w4a4-learned_r4-hybrid_zero2-universal-seed0-7"
    assert list(run.tags) == tags(to_plain(config))
    assert trackers.run_ids == {"wandb": run.run_id}
    assert config_of(folder) == mirrored_config(to_plain(config))

    defined = {record.name: record for record in records(folder, "metric")}
    assert all(record.step_metric == "_step" and not record.glob_name for record in defined.values())
    assert defined.keys() == {key for row in history(folder) for key in row} - {"step"}
    assert (defined["train/loss"].summary.min, defined["train/loss"].summary.max) == (True, False)
    summary = summary_of(folder)
    assert summary["train/tokens"] == {"last": 24}
    assert summary["memory/train/peak_rss_gib_max"] == {"max": 0.25, "last": 0.25}
    assert summary["evaluation"] == {"trained": {"perplexity": "inf"}}

    assert (summary["rotations"]["_type"], summary["rotations"]["nrows"]) == ("table-file", 2)
    (table,) = (folder / "wandb").glob("offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text()) == {
        "columns": list(ROWS[0]),
        "data": [list(row.values()) for row in ROWS],
    }
    (artifact,) = [record for record in records(folder, "artifact") if record.type == "rotations"]
    assert artifact.name == f"rotations-{run.run_id}"
    paths = {content.path: content.local_path for content in artifact.manifest.contents}
    assert paths == {
        name: str(folder / name) for name in ("rotations.safetensors", "config.resolved.yaml")
    }  # read where they lie, not copied
    assert [record.exit_code for record in records(folder, "exit")] == [0]


def test_a_failed_run_ends_as_failed_without_an_artifact(home: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "run", configured(), end={"status": "failed", "error": "no"})
    assert [record.exit_code for record in records(tmp_path / "run", "exit")] == [1]
    assert records(tmp_path / "run", "artifact") == []
    assert summary_of(tmp_path / "run")["error"] == "no"


def test_a_run_name_is_taken_as_it_is(home: Path, tmp_path: Path) -> None:
    recorded(tmp_path / "run", configured(tracker=TrackerConfig(mode=WandbMode.offline, run_name="my run, 1")))
    assert [run.display_name for run in records(tmp_path / "run", "run")] == ["my run, 1"]


def test_a_table_that_cannot_be_made_harms_neither_end_nor_exit_code(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(wandb, "Table", fail)
    recorded(tmp_path / "run", configured())
    assert [record.type for record in records(tmp_path / "run", "artifact")] == ["rotations"]
    assert [record.exit_code for record in records(tmp_path / "run", "exit")] == [0]
    assert summary_of(tmp_path / "run")["status"] == "done"
    assert [record.getMessage() for record in caplog.records if "read-only" in record.getMessage()] != []


def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_its_steps_never_go_back(home: Path, tmp_path: Path) -> None:
    config, folder = configured(), tmp_path / "run"
    plain = to_plain(config)
    folder.mkdir()
    first = open_trackers(config.tracker, TrackedRun(folder, plain), rank=0)
    for step in range(5):
        first.log({"train/loss": float(step)}, step=step)
    first.finish({"status": "interrupted"}, exit_code=1)
    run_id = first.run_ids["wandb"]
    assert run_id

    assert truncate_metrics(folder, 2) == 4
    again = open_trackers(config.tracker, TrackedRun(folder, plain, logged_to=4), rank=0, run_ids={"wandb": run_id})
    again.log({"time/load_s": 1.0}, step=2)
    for step in range(3, 7):
        again.log({"train/loss": float(step)}, step=step)
    again.finish({"status": "done"}, exit_code=0)
    assert again.run_ids == {"wandb": run_id}
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1  # it holds the whole history
    assert [run.run_id for run in records(folder, "run")] == [run_id]
    at_resuming = {"step": 2, "train/loss": 2, "time/load_s": 1}
    assert history(folder) == [
        {"step": 0, "train/loss": 0},
        {"step": 1, "train/loss": 1},
        at_resuming,
        *({"step": step, "train/loss": step} for step in range(3, 7)),
    ]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4, 5, 6]


def test_what_follows_the_last_step_that_wandb_saw_is_sent_one_step_on(home: Path, tmp_path: Path) -> None:
    tracker = TrackerConfig(mode=WandbMode.offline)
    mirror = WandbMirror(tracker, tmp_path, plain_config=to_plain(configured()), run_id="abc", logged_to=4)
    mirror.log({"eval/float/perplexity": 1.0}, step=0)
    mirror.log({"train/loss": 1.0}, step=4)
    mirror.log({"eval/trained/perplexity": 2.0}, step=4)
    mirror.finish({}, exit_code=0)
    assert history(tmp_path) == [{"step": 5, "eval/trained/perplexity": 2}]


def test_a_new_wandb_run_is_given_every_row_also_by_a_resumed_run(home: Path, tmp_path: Path) -> None:
    tracker = TrackerConfig(mode=WandbMode.offline)
    mirror = WandbMirror(tracker, tmp_path, plain_config=to_plain(configured()), run_id=None, logged_to=4)
    mirror.log({"train/loss": 1.0}, step=3)
    mirror.finish({}, exit_code=0)
    assert history(tmp_path) == [{"step": 3, "train/loss": 1}]


def test_a_mirror_that_was_given_up_has_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(wandb, "init", refuse)
    trackers = open_trackers(configured().tracker, TrackedRun(tmp_path, to_plain(configured())), rank=0)
    assert trackers.run_ids == {}
    trackers.finish({}, exit_code=0)
    assert Trackers([]).run_ids == {}


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, those of one step as one, numbers read as W&B's are."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update(row)
    return [{"step": step} | {key: row[key] for key in sorted(row) if key != "step"} for step, row in steps.items()]


def finite_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: "nan" if value != value else value for key, value in row.items()} for row in rows]


def test_a_run_is_rebuilt_from_its_files_as_it_was_mirrored(home: Path, tmp_path: Path) -> None:
    live, rebuilt = tmp_path / "live", tmp_path / "rebuilt"
    recorded(live, configured())
    jsonl = configured(tracker=TrackerConfig(kind=TrackerKind.jsonl, group="g"))
    recorded(rebuilt, jsonl)
    assert not (rebuilt / "wandb").exists()
    run_id = replay(rebuilt, mode=WandbMode.offline)
    (run,) = records(rebuilt, "run")
    assert (run.run_id, run.run_group) == (run_id, "g")
    assert config_of(rebuilt) == mirrored_config(to_plain(jsonl))
    rows = finite_rows(history(rebuilt))
    assert len(rows) == 4
    assert rows == comparable(rebuilt) == finite_rows(history(live))
    assert rows[2]["train/loss"] == "nan"
    ours, theirs = ({**summary_of(place)} for place in (rebuilt, live))
    assert ours["evaluation"] == theirs["evaluation"]
    assert ours["rotations"]["sha256"] == theirs["rotations"]["sha256"]
    assert [record.exit_code for record in records(rebuilt, "exit")] == [0]
    assert [record.type for record in records(rebuilt, "artifact")].count("rotations") == 1


@pytest.mark.parametrize("status", ["failed", "oom", "interrupted", "running"])
def test_a_run_that_is_not_done_is_rebuilt_as_failed(home: Path, tmp_path: Path, status: str) -> None:
    folder = tmp_path / "run"
    recorded(folder, configured(tracker=TrackerConfig(mode=WandbMode.disabled)), end={"status": status}, steps=1)
    assert replay(folder, mode=WandbMode.offline)
    assert [record.exit_code for record in records(folder, "exit")] == [1]


def test_options_that_this_version_does_not_know_are_no_obstacle(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recorded(folder, configured(tracker=TrackerConfig(mode=WandbMode.disabled)))
    file = folder / "config.resolved.yaml"
    plain = yaml.safe_load(file.read_text())
    plain["tracker"] = {"kind": "jsonl", "mode": "auto", "project": "rotexp", "color": "red"}  # others come with time
    file.write_text(yaml.safe_dump(plain))
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/renamed": 2.0}\n')
    assert replay(folder, mode=WandbMode.offline)
    assert history(folder) == [{"step": 1, "train/renamed": 2}]


@pytest.mark.parametrize("text", [None, "a: [", "- a"])
def test_a_run_without_a_readable_configuration_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.resolved.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.resolved\.yaml: .*restore it"):
        replay(tmp_path, mode=WandbMode.offline)


def test_the_runs_of_a_sweep_are_found(tmp_path: Path) -> None:
    for name in ("10", "9/deep", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("10", "9/deep"):
        (tmp_path / name / "summary.json").write_text("{}")
    assert find_runs(tmp_path) == [tmp_path / "10", tmp_path / "9" / "deep"]
    assert find_runs(tmp_path / "10") == [tmp_path / "10"]
    with pytest.raises(ValueError, match="holds no run"):
        find_runs(tmp_path / "other")
    with pytest.raises(ValueError, match="no such folder"):
        find_runs(tmp_path / "nowhere")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """Somebody is logged in; the commands that would be run and where; those in a folder `bad` fail."""
    calls: list[tuple[Path, list[str]]] = []

    class Ended:
        def __init__(self, code: int) -> None:
            self.returncode = code

    def run(command: list[str], *, check: bool, cwd: Path) -> Ended:
        calls.append((cwd, command))
        return Ended(int(cwd.name == "bad"))

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(upload.subprocess, "run", run)
    return calls


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, WandbMode]]:
    """The folders that would be rebuilt; one called `bad` fails, one called `odd` cannot be read."""
    calls: list[tuple[str, WandbMode]] = []

    def fake(folder: Path, *, mode: WandbMode) -> str | None:
        calls.append((folder.name, mode))
        if folder.name == "odd":
            raise ValueError(f"{folder}: odd")
        return None if folder.name == "bad" else "abc"

    monkeypatch.setattr(upload, "replay", fake)
    return calls


def test_a_rebuild_that_failed_is_tried_anew_the_next_time(
    tmp_path: Path, commands: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def fail(folder: Path, *, mode: WandbMode) -> None:
        tries.append(folder)
        (folder / "wandb" / f"run-{len(tries)}-abc").mkdir(parents=True)

    monkeypatch.setattr(upload, "replay", fail)
    folder = make_run(tmp_path / "run")
    assert [upload.upload([folder], rebuild=False) for _ in range(2)] == [1, 1]
    assert tries == [folder, folder]


def make_run(folder: Path, *wandb_runs: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"status": "done"}')
    for name in wandb_runs:
        (folder / "wandb" / name).mkdir(parents=True)
    return folder


def test_offline_runs_are_synchronized_in_the_order_they_were_made(
    tmp_path: Path, commands: list[Any], replayed: list[Any]
) -> None:
    folder = make_run(tmp_path / "run", "offline-run-2-abc", "offline-run-1-abc")
    assert upload.upload([folder], rebuild=False) == 0
    ((place, command),) = commands
    assert place == folder
    assert command[1:] == ["-m", "wandb", "sync", "wandb/offline-run-1-abc", "wandb/offline-run-2-abc"]
    assert replayed == []


def test_runs_without_an_offline_run_are_rebuilt_and_one_failure_does_not_stop_the_others(
    tmp_path: Path, commands: list[Any], replayed: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "bad", "odd", "z"):
        make_run(tmp_path / name)
    make_run(tmp_path / "online", "run-1-abc")
    assert upload.upload([tmp_path], rebuild=False) == 1
    assert replayed == [(name, WandbMode.online) for name in ("a", "bad", "odd", "z")]
    assert commands == []
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        f"{tmp_path}/a: rebuilt as abc",
        f"{tmp_path}/bad: was not uploaded",
        f"{tmp_path}/odd: was not uploaded",
        f"{tmp_path}/online: was uploaded before; --rebuild uploads it as a new run",
        f"{tmp_path}/z: rebuilt as abc",
    ]
    assert output.err == f"rotexp: {tmp_path}/odd: odd\n"


def test_an_exported_run_id_does_not_make_one_wandb_run_of_several(
    tmp_path: Path, commands: list[Any], replayed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    plain, offline = make_run(tmp_path / "a"), make_run(tmp_path / "b", "offline-run-1-abc")
    with pytest.raises(ValueError, match=r"^WANDB_RUN_ID=mine: would make one W&B run of the 2 to upload; unset it$"):
        upload.upload([tmp_path], rebuild=True)
    assert (replayed, commands) == ([], [])
    assert upload.upload([plain], rebuild=True) == upload.upload([plain, offline], rebuild=False) == 0
    assert [name for name, _ in replayed] == ["a", "a"]


@pytest.mark.parametrize("service", ["garbage", "3-1-tcp-localhost-9"])
def test_what_another_process_says_of_its_wandb_does_not_lose_the_mirror(
    service: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.teardown()  # of earlier tests, whose service this process would use on
    monkeypatch.setenv("WANDB_SERVICE", service)
    recorded(tmp_path / "run", configured(), steps=1)
    assert [row["step"] for row in history(tmp_path / "run")] == [0, 1]


def test_a_run_may_be_rebuilt_whatever_wandb_made_of_it(
    tmp_path: Path, commands: list[Any], replayed: list[Any]
) -> None:
    folder = make_run(tmp_path / "run", "offline-run-1-abc", "run-2-abc")
    assert upload.upload([folder], rebuild=True) == 0
    assert (replayed, commands) == ([("run", WandbMode.online)], [])


def test_a_failing_synchronization_is_a_failure(tmp_path: Path, commands: list[Any]) -> None:
    good, bad = (make_run(tmp_path / name, "offline-run-1-abc") for name in ("good", "bad"))
    assert upload.upload([bad, good], rebuild=False) == 1
    assert len(commands) == 2


def test_rows_of_rotations_are_their_own_figures_and_their_maxima_those_logged() -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"R1": torch.eye(6), "R2_3": torch.eye(4), "R2_11": torch.stack([torch.eye(3), torch.eye(3)])}
    now = {name: matrix + 1e-3 * torch.randn(matrix.shape, generator=generator) for name, matrix in start.items()}
    rows = rotation_rows(now, start, divergence={"R2_3": 0.5})
    facts = [(row["rotation"], row["layer"], row["order"], row["blocks"], row["max_abs_diff"]) for row in rows]
    assert facts == [("R1", None, 6, 1, 0.0), ("R2_3", 3, 4, 1, 0.5), ("R2_11", 11, 3, 2, 0.0)]
    for row in rows:
        matrix = now[row["rotation"]].double()
        away = (matrix @ matrix.mT - torch.eye(matrix.shape[-1], dtype=torch.float64)).abs().max()
        moved = (matrix - start[row["rotation"]].double()).flatten(-2).norm(dim=-1).max() / matrix.shape[-1] ** 0.5
        assert row["orthogonality_rrt_max"] == pytest.approx(away.item(), rel=1e-3)
        assert row["distance_from_init"] == pytest.approx(moved.item(), rel=1e-3)
        assert row["orthogonality_rtr_max"] == orthogonality_error(now[row["rotation"]])[1].max().item()
    for key, value in rotation_metrics(now, start).items():
        assert max(row[key.split("/")[1]] for row in rows) == value
    assert rotation_rows({}, {}) == []


def test_the_end_waits_longer_for_a_larger_artifact(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    join: Callable[..., None] = threading.Thread.join

    def counted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "wandb":
            waits.append(timeout)
        join(thread, timeout)

    mirror = WandbMirror(TrackerConfig(mode=WandbMode.offline), tmp_path, plain_config=to_plain(configured()))
    save_file({"R1": torch.zeros(2**20)}, tmp_path / "rotations.safetensors")
    monkeypatch.setattr(threading.Thread, "join", counted)
    mirror.finish({}, exit_code=0)
    (wait,) = waits
    assert wait == pytest.approx(64, abs=0.1)
