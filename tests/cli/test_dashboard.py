"""`python -m rotexp.dashboard` writes the workspace without network, and saves it only for who is logged in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NO_LOGIN = "not logged in to W&B, the workspace was not saved; run `wandb login`, or set WANDB_API_KEY"

pytest.importorskip("wandb_workspaces")


def dashboard(*arguments: str, place: Path) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    ended = subprocess.run(
        [sys.executable, "-m", "rotexp.dashboard", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "NETRC": str(place / "none")},
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_the_workspace_is_written_and_a_line_says_that_it_was_not_saved(tmp_path: Path) -> None:
    code, output, errors = dashboard("project=p", "entity=e", "out=spec.json", place=tmp_path)
    assert (code, output, errors) == (0, f"wrote spec.json\n{NO_LOGIN}\n", "")
    spec = json.loads((tmp_path / "spec.json").read_text())
    assert (spec["project"], spec["entity"]) == ("p", "e")
    sections = spec["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [
        "memory by sharding and model size",
        "correctness",
        "quality",
        "throughput",
        "comparison of runs",
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["spec.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"{NO_LOGIN}; or write it to a file by out=FILE"),
        (["projct=p"], "projct=p: no such key; choose one of project, entity, name, out (nearest: project)"),
        (["zzz"], "zzz: no such key; choose one of project, entity, name, out"),
        (["out="], "out=: has no value; write out=…"),
        (["project"], "project: has no value; write project=…"),
        (["out=no/such/folder/x"], "out=no/such/folder/x: cannot be written (No such file or directory); choose"),
        (["--save"], "unrecognized arguments: --save; --help shows what is allowed"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, output, errors = dashboard(*arguments, place=tmp_path)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"rotexp: {message}")
    assert list(tmp_path.iterdir()) == []
