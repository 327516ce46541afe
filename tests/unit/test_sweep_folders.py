"""The folders of a sweep's jobs: each has its own, wherever `hydra.sweep.subdir` puts it, and is one row everywhere."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run

from rotexp.comparison.collect import collect
from rotexp.sweep.outcome import Job, left
from rotexp.sweep.sweep import Sweep
from rotexp.train import main

Asked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sweep(
    tmp_path: Path, own_logging: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Asked:
    """Sweep in the folder `sweep`, where a job leaves a run that is done; returns exit code, output and errors."""

    def leave(kept: Sweep, jobs: Sequence[Job], **_: Any) -> None:
        for job in jobs:
            make_run(job.folder, seed=job.config.seed, tracker__run_name=job.config.tracker.group)
            kept.record(left(job))

    def ask(*arguments: str) -> tuple[int, str, str]:
        given = [f"hydra.sweep.dir={tmp_path}/sweep", *arguments]
        given += [] if any(argument.startswith("tracker=") for argument in given) else ["tracker=jsonl"]
        monkeypatch.setattr(sys, "argv", ["rotexp.train", "-m", *given])
        with pytest.raises(SystemExit) as end:
            main()
        return (int(str(end.value.code)), *capsys.readouterr())

    monkeypatch.setattr(Sweep, "run", leave)
    return ask


SUBDIRS = {
    "${hydra.job.num}": ["0", "1"],
    "a/b/${hydra.job.num}": ["a/b/0", "a/b/1"],
    "${seed}/run": ["3/run", "4/run"],
    "a b/${hydra.job.override_dirname}": ["a b/seed=3,tracker=jsonl", "a b/seed=4,tracker=jsonl"],
    "out/../in/./${seed}": ["in/3", "in/4"],
    ".hid/${hydra.job.num}": [".hid/0", ".hid/1"],
    "checkpoints/${hydra.job.num}": ["checkpoints/0", "checkpoints/1"],
    "a/wandb/${hydra.job.num}": ["a/wandb/0", "a/wandb/1"],
}


@pytest.mark.parametrize("subdir", SUBDIRS)
def test_jobs_in_subfolders_of_the_users_own_are_the_rows_of_table_file_and_report(
    subdir: str, sweep: Asked, tmp_path: Path
) -> None:
    code, output, errors = sweep("seed=3,4", f"hydra.sweep.subdir={subdir}")
    assert (code, errors) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        (seed, "done", place) for seed, place in zip("34", SUBDIRS[subdir], strict=True)
    ]
    folder = tmp_path / "sweep"
    jobs = json.loads((folder / "jobs.json").read_text())
    assert [job["folder"] for job in jobs] == [str(folder / place) for place in SUBDIRS[subdir]]
    for moved in (folder, tmp_path / "moved"):
        runs = collect([folder.rename(moved)], command="").runs
        assert [(run.name, run.status) for run in runs] == [(name, "done") for name in SUBDIRS[subdir]]
        assert [run.last("train/loss") is not None for run in runs] == [True, True]
    assert {run.config["tracker.run_name"] for run in runs} == {"sweep"}  # their W&B group


def test_a_job_without_a_run_is_a_row_in_its_own_place(sweep: Asked, tmp_path: Path) -> None:
    sweep("seed=3,4", "hydra.sweep.subdir=a/${seed}")
    (tmp_path / "sweep" / "a" / "4" / "summary.json").unlink()
    runs = collect([tmp_path / "sweep"], command="").runs
    assert [(run.name, run.status, run.axes) for run in runs] == [("a/3", "done", {}), ("a/4", "done", {"seed": "4"})]


SHARED = {
    "same": "gives seed=3 and seed=4 one folder, {folder}/same",
    "a/${model.name}": "gives seed=3 and seed=4 one folder, {folder}/a/tiny",
    "${seed}/../x": "gives seed=3 and seed=4 one folder, {folder}/x",
    ".": "{folder} does not lie below hydra.sweep.dir={folder}",
    "": "{folder} does not lie below hydra.sweep.dir={folder}",
    "../out/${seed}": "{parent}/out/3 does not lie below hydra.sweep.dir={folder}",
    "/nowhere/${seed}": "/nowhere/3 does not lie below hydra.sweep.dir={folder}",
}


@pytest.mark.parametrize("subdir", SHARED)
def test_a_subfolder_that_is_not_each_jobs_own_ends_the_sweep_before_anything_runs(
    subdir: str, sweep: Asked, tmp_path: Path
) -> None:
    fault = SHARED[subdir].format(folder=tmp_path / "sweep", parent=tmp_path)
    remedy = "leave it out, or let it differ from job to job below hydra.sweep.dir, as '${hydra.job.num}' does"
    refused = (2, "", f"rotexp: hydra.sweep.subdir={subdir}: {fault}; {remedy}\n")
    assert sweep("seed=3,4", f"hydra.sweep.subdir={subdir}") == refused
    assert sweep("seed=-1,3,4", f"hydra.sweep.subdir={subdir}") == refused  # nor is a wrong job recorded
    assert list(tmp_path.iterdir()) == []


def test_a_value_given_twice_is_blamed_where_it_is_the_reason(sweep: Asked) -> None:
    code, output, errors = sweep("seed=3,3")
    assert code == 2
    assert errors == "rotexp: seed=3: stands twice in this sweep; give each value once\n"
    assert output.count("│ done") == 1
    assert sweep("seed=3,3", "hydra.sweep.subdir=own/${hydra.job.num}")[0] == 0


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_sweep_folder_that_cannot_be_made_is_named_by_its_key(below: str, sweep: Asked, tmp_path: Path) -> None:
    (tmp_path / "sweep").write_text("a file")
    code, _, errors = sweep("seed=-1,3", f"hydra.sweep.dir={tmp_path}/sweep{below}")
    reason = "File exists" if not below else "Not a directory"
    assert code == 2
    assert errors.endswith(
        f"hydra.sweep.dir={tmp_path}/sweep{below}: cannot be made ({reason}); choose another folder\n"
    )


def test_an_exported_run_id_ends_a_sweep_before_it_makes_one_run_of_all_jobs(
    sweep: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    reason = "rotexp: WANDB_RUN_ID=abc: would make one W&B run of all jobs; unset it, or set tracker=jsonl\n"
    assert sweep("seed=3,4", "tracker=wandb") == (2, "", reason)
    assert sweep("seed=-1,4", "tracker=wandb") == (2, "", reason)
    assert list(tmp_path.iterdir()) == []
    assert sweep("seed=3,4", "tracker=wandb", "tracker.mode=disabled")[0] == 0


def test_a_job_whose_names_wandb_would_not_take_is_refused_and_the_others_run(sweep: Asked) -> None:
    code, output, errors = sweep("tracker.job_type=a," + "b" * 65, "tracker=wandb")
    assert code == 2
    assert errors.startswith(
        "rotexp: tracker.job_type=bbbbbbbbbbbbbbbbbbbb… (65 characters): must be 1 to 64 characters"
    )
    assert (output.count("│ done"), output.count("│ refused")) == (1, 1)
