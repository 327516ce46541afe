"""Jobs of a sweep that differ in training alone measure the untrained model once; anything else parts them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from nano_run import NANO

from rotexp.config.schema import COMPONENTS
from rotexp.experiment.context import Context, open_context
from rotexp.experiment.experiment import run_experiment
from rotexp.experiment.inputs import open_inputs
from rotexp.experiment.loading import load_model
from rotexp.experiment.measurements import Measurements
from rotexp.experiment.shared_rows import ROWS, find_rows, row_digests
from rotexp.metrics.quality import Quality
from rotexp.optim.options import CayleySGDConfig
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.runfolder.layout import JOBS_FILE, SUMMARY_FILE
from rotexp.runfolder.records import read_metrics, read_summary
from rotexp.training.options import Trainable, TrainConfig

CONFIG = replace(
    NANO,
    rotation=RotationConfig("learned", init=RotationInit.random),
    train=TrainConfig(steps=1, checkpoint_every=None),
)
DIGESTS = dict(zip(ROWS, "abcd", strict=True))
FIGURES = {"perplexity": 2.5, "kl": "inf", "top1_agreement": 0.5}

Open = Callable[..., Context]


@pytest.fixture(autouse=True)
def own_accelerator() -> Iterator[None]:
    """Let torch be as deterministic as it was before."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Opens a job of a sweep: `CONFIG` with some changes, in a folder of the sweep's."""

    def open_changed(name: str = "job", **changes: Any) -> Context:
        config = replace(CONFIG, **changes)
        (tmp_path / name).mkdir(exist_ok=True)
        return open_context(config, open_inputs(config), tmp_path / name, accelerator=Accelerator(cpu=True))

    return open_changed


def end(sweep: Path, *names: str, status: str = "done") -> None:
    """Let jobs have ended."""
    (sweep / JOBS_FILE).write_text(json.dumps([{"below": name, "status": status} for name in names]))


def summarize(folder: Path, *, rows: dict[str, str], origins: dict[str, str] | None = None) -> None:
    """Leave the summary of a job that measured rows of these digests."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"evaluation": dict.fromkeys(rows, FIGURES), "shared_rows": {"digests": rows, "from": origins or {}}}
    (folder / SUMMARY_FILE).write_text(json.dumps(summary))


def test_a_job_takes_over_what_another_has_measured(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_experiment(opened("first"))
    end(tmp_path, "first")
    capsys.readouterr()
    measured: list[str] = []
    timed = Measurements._timed
    monkeypatch.setattr(Measurements, "_timed", lambda self, row: (measured.append(row), timed(self, row))[1])
    run_experiment(opened("second", train=TrainConfig(steps=2, checkpoint_every=None)))
    first, second = (read_summary(tmp_path / name) for name in ("first", "second"))
    assert measured == ["trained"]
    assert {row: second["evaluation"][row] for row in ROWS} == {row: first["evaluation"][row] for row in ROWS}
    assert second["evaluation"]["trained"] != first["evaluation"]["trained"]
    assert second["shared_rows"] == {
        "digests": first["shared_rows"]["digests"],
        "from": dict.fromkeys(ROWS, "first"),
    }
    assert (first["shared_rows"]["from"], set(second["evaluation_seconds"])) == ({}, {"trained"})
    assert set(first["evaluation_seconds"]) == {*ROWS, "trained"}
    line = "rows float, quantized, start, hadamard are those of first; evaluation.share_rows=false measures them again"
    assert line in capsys.readouterr().out
    logged = {key for row in read_metrics(tmp_path / "second") for key in row}
    assert {"eval/hadamard/kl", "time/eval_trained_s"} <= logged
    assert "time/eval_hadamard_s" not in logged


def test_sharing_can_be_switched_off(opened: Open, tmp_path: Path) -> None:
    run_experiment(opened("first"))
    end(tmp_path, "first")
    run_experiment(opened("second", evaluation=replace(CONFIG.evaluation, share_rows=False)))
    second = read_summary(tmp_path / "second")
    assert set(second["evaluation_seconds"]) == {*ROWS, "trained"}
    assert "shared_rows" not in second
    assert second["evaluation"]["hadamard"] == read_summary(tmp_path / "first")["evaluation"]["hadamard"]


def test_rows_of_finished_jobs_are_found_by_their_digests(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    assert find_rows(own, DIGESTS) == {}
    summarize(tmp_path / "deep" / "other", rows=DIGESTS, origins={"start": "third"})
    assert find_rows(own, DIGESTS) == {}
    end(tmp_path, "deep/other")
    found = find_rows(own, DIGESTS)
    assert {row: origin for row, (_, origin) in found.items()} == dict.fromkeys(ROWS, "deep/other") | {"start": "third"}
    assert found["hadamard"][0] == Quality(2.5, float("inf"), 0.5)
    assert find_rows(own, DIGESTS | {"start": "x"}).keys() == {"float", "quantized", "hadamard"}
    assert find_rows(own, DIGESTS | {"float": "x"}).keys() == {"start", "hadamard"}


@pytest.mark.parametrize("status", ["failed", "interrupted", "oom"])
def test_only_jobs_that_are_done_are_believed(tmp_path: Path, status: str) -> None:
    summarize(tmp_path / "other", rows=DIGESTS)
    end(tmp_path, "other", status=status)
    assert find_rows(tmp_path / "mine", DIGESTS) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"evaluation": {}}', '{"shared_rows": "x", "evaluation": 1}'])
def test_damaged_files_of_others_are_passed_over(tmp_path: Path, text: str) -> None:
    summarize(tmp_path / "other", rows=DIGESTS)
    end(tmp_path, "other", "gone")
    (tmp_path / "other" / SUMMARY_FILE).write_text(text)
    assert find_rows(tmp_path / "mine", DIGESTS) == {}
    (tmp_path / JOBS_FILE).write_text(text)
    assert find_rows(tmp_path / "mine", DIGESTS) == {}


@pytest.mark.parametrize(
    ("changes", "parted"),
    [
        ({"train": TrainConfig(steps=7)}, ""),
        ({"optimizer": CayleySGDConfig(lr=0.2), "objective": COMPONENTS["objective"]["kl"]}, ""),
        ({"evaluation": replace(CONFIG.evaluation, every=1)}, ""),
        ({"rotation": replace(CONFIG.rotation, init=RotationInit.identity)}, "start"),
        ({"rotation": replace(CONFIG.rotation, r4=True)}, "start hadamard"),
        ({"train": replace(CONFIG.train, params=Trainable.all)}, "float quantized start hadamard"),
        ({"seed": 1}, "start hadamard"),
        ({"quant": QuantConfig("w3", weights=QuantSpec(3))}, "quantized start hadamard"),
        ({"evaluation": replace(CONFIG.evaluation, window=12)}, "float quantized start hadamard"),
        ({"evaluation": replace(CONFIG.evaluation, micro_batch_size=2)}, "float quantized start hadamard"),
    ],
    ids=str,
)
def test_a_digest_parts_what_another_figure_may_come_of(opened: Open, changes: dict[str, Any], parted: str) -> None:
    digests = []
    for changed in ({}, changes):
        context = opened(**changed)
        digests.append(row_digests(context, load_model(context), weights="0"))
        context.record.finish({})
    differing = [row for row in ROWS if digests[0][row] != digests[1][row]]
    assert differing == parted.split()


def test_codes_that_are_multiplied_part_what_is_quantized(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    context = opened()
    context.record.finish({})
    model = load_model(context)
    here, there = [], []
    for digests, units in ((here, True), (there, False)):
        monkeypatch.setattr("rotexp.experiment.shared_rows.has_integer_units", lambda units=units: units)
        digests.append(row_digests(context, model, weights="0"))
    assert [row for row in ROWS if here[0][row] != there[0][row]] == ["quantized", "start", "hadamard"]


@pytest.mark.parametrize("fact", ["weights", "versions", "code", "threads"])
def test_other_weights_versions_code_and_threads_part_all_rows(
    opened: Open, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = opened()
    context.record.finish({})
    model = load_model(context)
    before = row_digests(context, model, weights="0")
    where = "rotexp.experiment.shared_rows"
    if fact == "versions":
        monkeypatch.setattr(f"{where}.versions", lambda: {"torch": "0"})
    if fact == "code":
        monkeypatch.setattr(f"{where}._code_digest", lambda: "0")
    if fact == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    after = row_digests(context, model, weights="1" if fact == "weights" else "0")
    assert all(before[row] != after[row] for row in ROWS)
