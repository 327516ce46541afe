"""`python -m rotexp.upload DIR…` refuses wrong requests in one line, and uploads nothing without a login."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def upload(*arguments: str, place: Path, module: str = "rotexp.upload", **environment: str) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "NETRC": str(place / "none"), **environment},
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with an offline W&B run."""
    folder = tmp_path / "run"
    (folder / "wandb" / "offline-run-1-abc").mkdir(parents=True)
    (folder / "summary.json").write_text('{"status": "done"}')
    return folder


@pytest.mark.parametrize("flags", [[], ["--rebuild"]])
def test_without_a_login_nothing_is_uploaded(tmp_path: Path, run: Path, flags: list[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, output, errors = upload("run", *flags, place=tmp_path)
    assert (code, output) == (2, "")
    assert errors == ("rotexp: not logged in to W&B, nothing was uploaded; run `wandb login`, or set WANDB_API_KEY\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: DIR; --help shows what is allowed"),
        (["nowhere"], "nowhere: no such folder; name the folder of a run or of a sweep"),
        (["empty"], "empty: holds no run; name the folder of a run or of a sweep"),
        (["run", "empty"], "empty: holds no run; name the folder of a run or of a sweep"),
        (["run", "--again"], "unrecognized arguments: --again; --help shows what is allowed"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(tmp_path: Path, run: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    code, output, errors = upload(*arguments, place=tmp_path, WANDB_API_KEY="x" * 40)
    assert (code, output, errors) == (2, "", f"rotexp: {message}\n")


def test_a_run_that_was_uploaded_is_not_uploaded_twice(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "0"
    (folder / "wandb" / "run-1-abc").mkdir(parents=True)
    (folder / "summary.json").write_text('{"status": "done"}')
    code, output, errors = upload("sweep", place=tmp_path, WANDB_API_KEY="x" * 40)
    assert (code, errors) == (0, "")
    assert output == "sweep/0: was uploaded before; --rebuild uploads it as a new run\n"


def test_a_damaged_run_is_named_and_a_failure(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    code, output, errors = upload("run", place=tmp_path, WANDB_API_KEY="x" * 40)
    assert (code, output) == (1, "run: was not uploaded\n")
    assert errors.count("\n") == 1
    assert "run/config.resolved.yaml: cannot be read" in errors


def test_the_old_name_answers_as_the_new_one_does_and_says_so(tmp_path: Path, run: Path) -> None:
    code, output, errors = upload("run", place=tmp_path)
    old_code, old_output, old_errors = upload("run", place=tmp_path, module="rotexp.sync")
    assert (old_code, old_output) == (code, output)
    assert old_errors == f"rotexp: rotexp.sync is now called rotexp.upload\n{errors}"
