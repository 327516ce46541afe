"""Commands that read the folders of runs: a damaged file is named in one line, and harms nothing that is whole."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from damaged import damaged
from report_runs import make_run

from rotexp.comparison.collect import collect
from rotexp.comparison.report import report
from rotexp.config.composition import resolved_yaml
from rotexp.config.schema import COMPONENTS, Config
from rotexp.data.options import DataConfig, DataSource
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.options import RotationConfig
from rotexp.runfolder.finished_run import read_finished_run
from rotexp.tracking.options import WandbMode
from rotexp.tracking.upload import replay

CONFIG = Config(
    model=ModelConfig("tiny", ModelSource.tiny),
    data=DataConfig("builtin", DataSource.builtin),
    quant=QuantConfig("w4a4", weights=QuantSpec(bits=4)),
    rotation=RotationConfig("learned"),
    optimizer=COMPONENTS["optimizer"]["cayley_sgd"],
    objective=COMPONENTS["objective"]["ce"],
)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run that is done."""
    folder = make_run(tmp_path / "run")
    (folder / "config.resolved.yaml").write_text(resolved_yaml(CONFIG))
    (folder / "rotations.safetensors").touch()
    assert read_finished_run(folder).config == CONFIG
    return folder


@damaged
def test_a_finished_run_with_a_damaged_file_is_refused_by_its_name(content: bytes, reason: str, finished: Path) -> None:
    summary = (finished / "summary.json").read_bytes()
    (finished / "summary.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"summary\.json") as end:
        read_finished_run(finished)
    assert str(end.value) == f"run={finished}: summary.json cannot be read ({reason}); name another run"
    (finished / "summary.json").write_bytes(summary)
    (finished / "config.resolved.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.resolved\.yaml") as end:
        read_finished_run(finished)
    line = str(end.value)
    assert line.startswith(f"run={finished}: config.resolved.yaml is not the configuration of a run (")
    assert line.endswith("); restore it")
    assert "\n" not in line


@pytest.mark.parametrize("change", [{"train": None}, {"train": {}}, {"train": {"steps": "4"}}, {"train": [4]}])
def test_a_summary_that_does_not_say_what_was_trained_is_named(change: dict[str, Any], finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert read_finished_run(finished).trained_steps == 4
    (finished / "summary.json").write_text(json.dumps(summary | change))
    with pytest.raises(ValueError, match=r"summary\.json says no train\.steps; restore it, or name another run"):
        assert read_finished_run(finished).trained_steps


@damaged
@pytest.mark.parametrize("name", ["config.resolved.yaml", "summary.json"])
def test_a_run_that_cannot_be_uploaded_again_is_named(name: str, content: bytes, reason: str, finished: Path) -> None:
    (finished / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(name)) as end:
        replay(finished, mode=WandbMode.offline)
    line = str(end.value)
    assert line.startswith(f"{finished}/{name}: cannot be read (")
    assert line.endswith("; restore it")
    assert "\n" not in line
    assert not (finished / "wandb").exists()


@damaged
@pytest.mark.parametrize("name", ["config.resolved.yaml", "summary.json", "metrics.jsonl", "jobs.json"])
def test_a_report_over_runs_lists_the_damaged_one_and_shows_the_others(
    name: str, content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "bad", seed=1)
    make_run(tmp_path / "good", seed=2)
    (tmp_path / "jobs.json").write_text("[]")
    (tmp_path / ("" if name == "jobs.json" else "bad") / name).write_bytes(content)
    report([str(tmp_path), "--csv", str(tmp_path / "runs.csv"), "--json", str(tmp_path / "runs.json")])
    rows = json.loads((tmp_path / "runs.json").read_text())
    assert [(row["run"], row["status"] == "done") for row in rows] == [
        ("bad", name != "summary.json"),
        ("good", True),
    ]
    notes = [note for note in collect([tmp_path], command="").notes if name in note]
    whole = (name, content) == ("jobs.json", b"[]") or (name, content) == ("metrics.jsonl", b"")
    assert len(notes) == (0 if whole else 1)
    assert all("cannot be read" in note and "\n" not in note for note in notes)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(note.partition(" cannot")[0] in shown for note in notes)


ODD: dict[str, Callable[[Path], object]] = {
    "dates": lambda run: (run / "config.resolved.yaml").write_text("seed: 2026-01-01\nx: {2026-01-01: !!set {a, b}}"),
    "binary": lambda run: (run / "config.resolved.yaml").write_text("seed: !!binary aGVsbG8="),
    "own alias": lambda run: (run / "config.resolved.yaml").write_text("seed: 1\na: &a {b: *a}"),
    "own list": lambda run: (run / "config.resolved.yaml").write_text("seed: &a [*a]"),
    "huge numbers": lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1' + "0" * 400 + "}"),
    "huge steps": lambda run: (run / "metrics.jsonl").write_text('{"step": 1' + "0" * 400 + ', "train/loss": 1}'),
    "lists of figures": lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": [1], "x": {}}'),
    "odd summary": lambda run: (run / "summary.json").write_text(
        json.dumps(
            {"status": {"a": 1}, "error": [1], "memory": {"load": 3}, "train": "x", "evaluation": {"protocol": 1}}
        )
    ),
    "no end": lambda run: (run / "summary.json").write_text('{"status": "running", "world_size": 1e999}'),
}


@pytest.mark.parametrize("damage", ODD)
def test_values_of_another_kind_do_not_break_a_report(damage: str, tmp_path: Path) -> None:
    make_run(tmp_path / "bad", seed=1)
    make_run(tmp_path / "good", seed=2)
    ODD[damage](tmp_path / "bad")
    report([str(tmp_path), "--csv", str(tmp_path / "runs.csv"), "--json", str(tmp_path / "runs.json")])
    rows = json.loads((tmp_path / "runs.json").read_text())
    assert [row["run"] for row in rows] == ["bad", "good"]
    assert rows[1]["status"] == "done"


JOBS: list[Any] = [
    {"name": "a", "status": "running"},
    {"name": ["a"], "axes": {"x": [1]}, "folder": {"b": 2}, "status": None},
    {"name": "b", "below": "../../../outside", "axes": [1]},
    {"name": "c", "below": 3},
    {"name": None},
    None,
]


def test_odd_jobs_of_a_sweep_do_not_break_a_report(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    (tmp_path / "jobs.json").write_text(json.dumps(JOBS))
    report([str(tmp_path), "--json", str(tmp_path / "runs.json")])
    rows = json.loads((tmp_path / "runs.json").read_text())
    assert sum(row["status"] == "done" for row in rows) == 1
    assert yaml.safe_load((tmp_path / "good" / "config.resolved.yaml").read_text())["seed"] == 0
