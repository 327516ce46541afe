"""Real sweeps: whatever happens to one job, the others are what they are alone, and a rerun does only what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from run_train import Run, left_behind, run_train

from rotexp.tracking.console import ROWS

pytestmark = pytest.mark.slow

START_SECONDS = 280
FORBIDDEN = set("= ,{}%#$")

FATE = """
import os, sys

class Fate:
    '''Ends the process of a job when it is about to run its experiment.'''

    def find_spec(self, name, path=None, target=None):
        if name == "rotexp.experiment.experiment":
            exec({fates}.get(sys.orig_argv[-1].removesuffix(".yaml"), ""))

sys.meta_path.insert(0, Fate())
"""


@pytest.fixture(scope="module")
def sweep_options(small: list[str]) -> list[str]:
    """The small job without its number of steps."""
    return [*(override for override in small if not override.startswith("train.steps")), "tracker=jsonl"]


@pytest.fixture(scope="module")
def alone(sweep_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The third job of the sweeps, by itself."""
    ended = run_train(tmp_path_factory.mktemp("alone") / "run", *sweep_options, "train.steps=2", "seed=3")
    assert ended.code == 0, ended.errors
    return ended


def sweep(folder: Path, *arguments: str, fates: dict[str, str] | None = None) -> Run:
    """Run a sweep.

    Args:
        fates: statements of Python that end the process of a job, by the name of the job.
    """
    mark = uuid.uuid4().hex
    environment = os.environ | {"ROTEXP_TEST": mark}
    if fates:
        place = folder.parent / "fate"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(FATE.format(fates=fates), encoding="utf-8")
        environment["PYTHONPATH"] = os.pathsep.join([str(place), *environment.get("PYTHONPATH", "").split(os.pathsep)])
    ended = subprocess.run(
        [sys.executable, "-m", "rotexp.train", "-m", *arguments, f"hydra.sweep.dir={folder}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=environment,
    )
    return Run(folder, ended.returncode, ended.stdout, ended.stderr, left_behind(mark))


def table(ended: Run) -> list[list[str]]:
    """Return the cells of the rows of the table at the end."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ended.output.splitlines()]
    names = {*ROWS.values(), "merged"}  # of the rows of a run's own table
    return [row for row in rows if len(row) > 5 and row[0] not in names]


def assert_same(folder: Path, alone: Run) -> None:
    run = Run(folder, 0, "", "")
    assert run.summary["status"] == "done"
    assert run.rotations.keys() == alone.rotations.keys()
    assert all(torch.equal(matrix, alone.rotations[name]) for name, matrix in run.rotations.items())
    assert run.summary["evaluation"] == alone.summary["evaluation"]


@pytest.mark.timeout(600)
def test_jobs_that_end_badly_leave_the_next_as_it_is_alone(
    sweep_options: list[str], alone: Run, tmp_path: Path
) -> None:
    fates = {
        "seed-1": ("raise RuntimeError('[injected]')", "[injected]"),
        "seed-2": ("os._exit(5)", "the process ended with exit code 5 before the run was done"),
        "seed-4": ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    }
    folder = tmp_path / "sweep"
    ended = sweep(
        folder,
        "seed=1,2,4,3",
        "train.steps=2",
        *sweep_options,
        fates={name: fate for name, (fate, _) in fates.items()},
    )
    assert (ended.code, ended.left_behind) == (1, []), ended.errors
    rows = table(ended)
    assert [row[:2] for row in rows] == [["1", "failed"], ["2", "failed"], ["4", "failed"], ["3", "done"]]
    assert [row[-1] for row in rows[:3]] == [error for _, error in fates.values()]
    for name, (_, error) in fates.items():
        summary = Run(folder / name, 0, "", "").summary
        assert (summary["status"], summary["error"]) == ("failed", error)
    assert_same(folder / "seed-3", alone)


@pytest.mark.timeout(600)
def test_wrong_jobs_and_a_failed_rank_leave_the_rest_as_it_is_alone(
    sweep_options: list[str], alone: Run, tmp_path: Path
) -> None:
    """Wrong by itself, wrong for its world, wrong in form; and a rank that fails while its peer does not."""
    folder = tmp_path / "sweep"
    (folder / "sharding-full__seed-3" / "rank-1.log").mkdir(parents=True)  # so that only rank 1 cannot open its log
    ended = sweep(folder, "sharding=nope,full,no_shard", "seed=-1,abc,3", "train.steps=2", *sweep_options)
    assert (ended.code, ended.left_behind) == (2, []), ended.errors
    rows = {(row[0], row[1]): row for row in table(ended)}
    assert len(rows) == 9
    states = {key: row[2] for key, row in rows.items()}
    assert states.pop(("no_shard", "3")) == "done"
    assert states.pop(("full", "3")) == "failed"
    assert set(states.values()) == {"refused"}
    assert "rank 1: IsADirectoryError" in rows["full", "3"][-1]
    assert "nope: no such option" in rows["nope", "3"][-1]
    assert "seed=-1: must be 0 or more" in rows["full", "-1"][-1]
    assert "seed=abc: must be a whole number" in rows["no_shard", "abc"][-1]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        "sharding-full__seed-3",
        "sharding-no_shard__seed-3",
    }
    assert_same(folder / "sharding-no_shard__seed-3", alone)


@pytest.mark.timeout(600)
def test_a_rerun_does_only_what_is_left_and_the_first_failure_can_end_a_sweep(
    sweep_options: list[str], alone: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    request = ("seed=1,2,3", "train.steps=2", *sweep_options)
    first = sweep(folder, *request, "sweep.fail_fast=true", fates={"seed-2": "os._exit(7)"})
    assert first.code == 1
    assert [row[1] for row in table(first)] == ["done", "failed", "not started"]
    assert not (folder / "seed-3").exists()
    again = re.search(r"^to go on: python -m rotexp.train (.+)$", first.output, re.MULTILINE)
    assert again is not None
    assert f"hydra.sweep.dir={folder}" in again[1]
    before = (folder / "seed-1" / "summary.json").stat().st_mtime_ns
    second = sweep(folder, *request)
    assert (second.code, second.left_behind) == (0, []), second.errors
    assert [row[1] for row in table(second)] == ["done before", "done", "done"]
    assert table(second)[0][2] == f"{Run(folder / 'seed-1', 0, '', '').perplexities['trained']:.4g}"
    assert (folder / "seed-1" / "summary.json").stat().st_mtime_ns == before
    assert "to go on" not in second.output
    assert_same(folder / "seed-3", alone)
    other = sweep(folder, "seed=1", "train.steps=3", "hydra.sweep.subdir=seed-1", *sweep_options)
    assert other.code == 2
    assert "is done with another train.steps; choose another folder" in other.output + other.errors


@pytest.mark.timeout(600)
def test_a_rerun_finds_the_runs_in_nested_subfolders_of_the_users_own(sweep_options: list[str], tmp_path: Path) -> None:
    folder, subdir = tmp_path / "sweep", "hydra.sweep.subdir=a/.b/${hydra.job.num}"
    first = sweep(folder, "seed=3", subdir, "train.steps=0", *sweep_options)
    assert first.code == 0, first.errors
    written = (folder / "a" / ".b" / "0" / "summary.json").stat().st_mtime_ns
    second = sweep(folder, "seed=3,4", subdir, "train.steps=0", *sweep_options)
    assert second.code == 0, second.errors
    assert [(row[1], row[-2]) for row in table(second)] == [("done before", "a/.b/0"), ("done", "a/.b/1")]
    assert (folder / "a" / ".b" / "0" / "summary.json").stat().st_mtime_ns == written
    other = sweep(folder, "seed=4", subdir, "train.steps=0", *sweep_options)
    assert other.code == 2
    assert f"{folder}/a/.b/0: single is done with another seed; choose another folder" in other.errors + other.output


def start_sweep(*arguments: str, mark: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rotexp.train", "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"ROTEXP_TEST": mark},
        start_new_session=True,
    )


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_process_and_a_sweep_that_goes_on(
    number: signal.Signals,
    code: int,
    sweep_options: list[str],
    started: list[subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    """In a sweep of two jobs on two ranks each, the first of which trains."""
    folder, mark = tmp_path / "sweep", uuid.uuid4().hex
    request = ("sharding=zero2,full", *sweep_options, f"hydra.sweep.dir={folder}")
    run = start_sweep("train.steps=100000", *request, mark=mark)
    started.append(run)
    metrics = folder / "sharding-zero2" / "metrics.jsonl"
    deadline = time.monotonic() + START_SECONDS
    while not (metrics.exists() and metrics.read_text().count("train/loss") > 3):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(run.pid, number)
    output, errors = run.communicate(timeout=60)
    assert run.returncode == code
    assert left_behind(mark) == []
    assert "Traceback" not in errors
    assert [row[1] for row in table(Run(folder, 0, output, errors))] == ["interrupted", "not started"]
    assert json.loads((folder / "sharding-zero2" / "summary.json").read_text())["status"] == "interrupted"
    assert f"hydra.sweep.dir={folder}" in output.splitlines()[-1]


@pytest.mark.timeout(900)
def test_an_interrupted_sweep_goes_on_from_its_checkpoints(
    sweep_options: list[str], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder, mark = tmp_path / "sweep", uuid.uuid4().hex
    request = ("seed=1,2", "train.steps=300", *sweep_options)
    run = start_sweep(*request, f"hydra.sweep.dir={folder}", mark=mark)
    started.append(run)
    metrics = folder / "seed-1" / "metrics.jsonl"
    deadline = time.monotonic() + START_SECONDS
    while not (metrics.exists() and metrics.read_text().count("train/loss") > 3):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert [row[1] for row in table(Run(folder, 0, output, ""))] == ["interrupted", "not started"]
    made = len(Run(folder / "seed-1", 0, "", "").steps)
    assert 3 < made < 300
    again = sweep(folder, *request)
    assert (again.code, again.left_behind) == (0, []), again.errors
    assert [row[1] for row in table(again)] == ["done", "done"]
    steps = [row["step"] for row in Run(folder / "seed-1", 0, "", "").steps]
    assert steps == list(range(1, 301)), "no step was made twice, none left out"


@pytest.mark.timeout(900)
def test_two_sweeps_at_once_do_not_meet(
    sweep_options: list[str], alone: Run, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Started in the same second, in folders of the default name, each with two jobs at once."""
    mark = uuid.uuid4().hex
    request = ("seed=2,3", "train.steps=2", "sweep.jobs_at_once=2", *sweep_options)
    started += [start_sweep(*request, mark=mark, cwd=tmp_path) for _ in range(2)]
    for run in started:
        output, errors = run.communicate(timeout=2 * START_SECONDS)
        assert (run.returncode, errors) == (0, ""), output
    assert left_behind(mark) == []
    folders = [path.parent for path in tmp_path.glob("multirun/*/*/jobs.json")]
    assert len(folders) == 2
    for folder in folders:
        assert_same(folder / "seed-3", alone)
        assert json.loads((folder / "jobs.json").read_text())[0]["name"] == "seed-2"
        assert "run folder: " in (folder / "seed-3" / "job.log").read_text()


def test_folders_and_names_are_clean_whatever_the_values(texts: list[str], tmp_path: Path) -> None:
    """By the folders of jobs that fail, since there is no such model."""
    folder = tmp_path / "sweep"
    paths = "model.path='/no where/a=b,{c}','/no where/100%#$x'"
    ended = sweep(folder, "model=hf", paths, *texts, "tracker=jsonl")
    assert ended.code == 2
    jobs: list[dict[str, Any]] = json.loads((folder / "jobs.json").read_text())
    assert [job["status"] for job in jobs] == ["refused", "refused"]
    assert len({job["name"] for job in jobs}) == 2
    for job in jobs:
        assert not FORBIDDEN & set(job["name"])
        assert Path(job["folder"]).name == job["name"]
    assert [row[1] for row in table(ended)] == ["refused", "refused"]


def test_a_killed_sweep_takes_its_jobs_with_it(
    sweep_options: list[str], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    run = start_sweep(
        "seed=1,2", "train.steps=100000", *sweep_options, f"hydra.sweep.dir={tmp_path / 'sweep'}", mark=mark
    )
    started.append(run)
    deadline = time.monotonic() + START_SECONDS
    while not (children := psutil.Process(run.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    run.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert left_behind(mark) == []
