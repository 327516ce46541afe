"""Where a run begins: at its own newest complete checkpoint, at one that is named, or at the first step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from damaged import RUN_FACTS, damaged

from rotexp.config.schema import Config
from rotexp.experiment.beginning import Beginning, check_model, find_beginning
from rotexp.runfolder.checkpoint_folders import aside_of, complete, prepare_aside, step_folder
from rotexp.training.options import Trainable, TrainConfig

CONFIG = Config(train=TrainConfig(steps=6))


def checkpoint(folder: Path, step: int, *, params: str = "rotations") -> Path:
    """Complete a checkpoint that holds one file."""
    path = step_folder(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    prepare_aside(path)
    (aside_of(path) / "numbers").write_text("0123456789")
    complete(path, step=step, world_size=1, facts=RUN_FACTS | {"config": {"train": {"params": params}}})
    return path


def ended(folder: Path, status: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    return folder


def resuming(value: Any, **train: Any) -> Config:
    return replace(CONFIG, resume=str(value), train=replace(CONFIG.train, **train))


@pytest.mark.parametrize("status", ["running", "failed", "oom", "interrupted"])
def test_an_unfinished_run_goes_on_from_its_newest_checkpoint(tmp_path: Path, status: str) -> None:
    folder = ended(tmp_path / "run", status)
    checkpoint(folder, 2)
    newest = checkpoint(folder, 4)
    assert find_beginning(CONFIG, folder) == Beginning(newest, own=True)


def test_a_truncated_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    folder = ended(tmp_path / "run", "failed")
    older, newest = checkpoint(folder, 2), checkpoint(folder, 4)
    (newest / "numbers").write_text("01234")
    found = find_beginning(CONFIG, folder)
    assert (found.path, found.own) == (older, True)
    assert found.notes == (f"{newest}: numbers is truncated (5 instead of 10 bytes)",)


@damaged
def test_a_damaged_summary_is_named_and_the_run_goes_on_from_its_checkpoint(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    folder = ended(tmp_path / "run", "failed")
    (folder / "summary.json").write_bytes(content)
    fault = f"summary.json cannot be read ({reason})"
    with pytest.raises(
        ValueError, match="no complete checkpoint is there"
    ) as end:  # a run that was done may have left no checkpoint
        find_beginning(CONFIG, folder)
    remedy = "restore summary.json, or remove it to start again, or choose another folder"
    assert str(end.value) == f"hydra.run.dir={folder}: {fault}; no complete checkpoint is there; {remedy}"
    newest = checkpoint(folder, 4)
    assert find_beginning(CONFIG, folder) == Beginning(newest, own=True, notes=(fault,))
    with pytest.raises(ValueError, match=re.escape(f"already holds a run ({fault}), and resume=never; choose another")):
        find_beginning(resuming("never"), folder)


@pytest.mark.parametrize("status", ["{}", '{"status": null}', '{"status": ["done"]}', '{"status": "donee"}'])
def test_a_summary_without_a_status_is_damaged_too(status: str, tmp_path: Path) -> None:
    folder = ended(tmp_path / "run", "failed")
    (folder / "summary.json").write_text(status)
    newest = checkpoint(folder, 4)
    assert find_beginning(CONFIG, folder).notes == ("summary.json says no status that there is",)
    assert find_beginning(CONFIG, folder).path == newest


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "config.resolved.yaml"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    checkpoint(tmp_path, 4)
    with pytest.raises(ValueError, match=f"hydra.run.dir={tmp_path}: {name} in it is a folder; remove it, or choose"):
        find_beginning(CONFIG, tmp_path)


@damaged
def test_a_checkpoint_whose_description_is_damaged_is_passed_over_and_named(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    folder = ended(tmp_path / "run", "failed")
    older, newest = checkpoint(folder, 2), checkpoint(folder, 4)
    (newest / "facts.json").write_bytes(content)
    found = find_beginning(CONFIG, folder)
    assert (found.path, found.notes) == (older, (f"{newest}: facts.json cannot be read ({reason})",))


@pytest.mark.parametrize(
    "change", [{"step": "4"}, {"world_size": None}, {"files": []}, {"files": {"numbers": "x"}}, {"facts": "x"}]
)
def test_a_description_of_another_kind_is_passed_over_and_named(change: dict[str, Any], tmp_path: Path) -> None:
    folder = ended(tmp_path / "run", "failed")
    older, newest = checkpoint(folder, 2), checkpoint(folder, 4)
    facts = json.loads((newest / "facts.json").read_text())
    (newest / "facts.json").write_text(json.dumps(facts | change))
    found = find_beginning(CONFIG, folder)
    assert (found.path, found.notes) == (older, (f"{newest}: facts.json is not that of a checkpoint of rotexp",))


UNFIT: dict[str, Any] = {
    "base.model": {"base": {"digest": "d"}},
    "base.digest": {"base": {"model": "tiny"}},
    "config.train.params": {"config": {"train": "x"}},
    "evaluation.protocol": {"evaluation": None},
    "phases": {"phases": []},
    "state.seconds": {"state": {"seconds": "3"}},
    "tracker": {"tracker": "x"},
}


@pytest.mark.parametrize("key", UNFIT)
def test_a_description_without_what_a_run_goes_on_from_is_passed_over_and_named(key: str, tmp_path: Path) -> None:
    folder = ended(tmp_path / "run", "failed")
    older, newest = checkpoint(folder, 2), checkpoint(folder, 4)
    whole = json.loads((newest / "facts.json").read_text())
    (newest / "facts.json").write_text(json.dumps(whole | {"facts": whole["facts"] | UNFIT[key]}))
    found = find_beginning(CONFIG, folder)
    fault = f"facts.json is not that of a run (facts.{key} is missing, or of another kind)"
    assert (found.path, found.notes) == (older, (f"{newest}: {fault}",))
    check_model(found, "tiny")
    with pytest.raises(ValueError, match="model=other: must be tiny, as it was"):
        check_model(found, "other")


def test_a_checkpoint_that_names_no_file_is_not_complete(tmp_path: Path) -> None:
    folder = ended(tmp_path / "run", "failed")
    older, newest = checkpoint(folder, 2), checkpoint(folder, 4)
    (newest / "facts.json").write_text(json.dumps(json.loads((newest / "facts.json").read_text()) | {"files": {}}))
    found = find_beginning(CONFIG, folder)
    assert (found.path, found.notes) == (older, (f"{newest}: facts.json names no other file",))


def test_a_run_without_a_checkpoint_starts_again_and_says_so(tmp_path: Path) -> None:
    found = find_beginning(CONFIG, ended(tmp_path / "run", "failed"))
    assert (found.path, found.own) == (None, False)
    assert found.notes == ("the run in this folder left no complete checkpoint; it starts again",)


def test_a_new_folder_starts_at_the_first_step(tmp_path: Path) -> None:
    assert find_beginning(CONFIG, tmp_path / "new") == Beginning()
    assert find_beginning(resuming("never"), tmp_path / "new") == Beginning()


def test_a_named_run_or_checkpoint_is_begun_at_but_not_continued(tmp_path: Path) -> None:
    source = ended(tmp_path / "source", "done")
    second, fourth = checkpoint(source, 2), checkpoint(source, 4)
    for named, path in ((source, fourth), (second, second)):
        assert find_beginning(resuming(named), tmp_path / "new") == Beginning(path, own=False)


def test_once_begun_elsewhere_a_run_goes_on_from_its_own(tmp_path: Path) -> None:
    source = ended(tmp_path / "source", "done")
    checkpoint(source, 2)
    folder = ended(tmp_path / "run", "interrupted")
    own = checkpoint(folder, 3)
    assert find_beginning(resuming(source), folder) == Beginning(own, own=True)


def test_one_that_broke_off_before_its_first_checkpoint_begins_elsewhere_again(tmp_path: Path) -> None:
    source = ended(tmp_path / "source", "done")
    path = checkpoint(source, 2)
    found = find_beginning(resuming(source), ended(tmp_path / "run", "failed"))
    assert (found.path, found.own) == (path, False)


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"already holds a run \(status done\); choose another, or remove it"):
        find_beginning(CONFIG, ended(tmp_path / "done", "done"))
    folder = ended(tmp_path / "failed", "failed")
    with pytest.raises(ValueError, match=r"already holds a run \(status failed\), and resume=never; choose another"):
        find_beginning(resuming("never"), folder)
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=rf"resume={missing}: holds no complete checkpoint \(none is there\); name"):
        find_beginning(resuming(missing), tmp_path / "new")
    broken = checkpoint(folder, 2)
    (broken / "numbers").unlink()
    with pytest.raises(ValueError, match=rf"resume={broken}: holds no complete .*\({broken}: numbers is missing\)"):
        find_beginning(resuming(broken), tmp_path / "new")


@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_past_the_last_step_or_of_other_parameters_is_refused(tmp_path: Path, own: bool) -> None:
    source = ended(tmp_path / "source", "failed")
    path = checkpoint(source, 4)
    folder, resume = (source, "auto") if own else (tmp_path / "new", source)
    remedy = f"change it, or start in another folder than that of {path}"
    with pytest.raises(ValueError, match=rf"train.steps=3: must be at least the 4 done; {remedy}"):
        find_beginning(resuming(resume, steps=3), folder)
    with pytest.raises(ValueError, match=rf"train.params=all: must be rotations, as it was; {remedy}"):
        find_beginning(resuming(resume, params=Trainable.all), folder)
    assert find_beginning(resuming(resume, steps=4), folder).path == path


def test_it_is_decided_before_torch_is_imported() -> None:
    code = "import sys, rotexp.experiment.beginning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
