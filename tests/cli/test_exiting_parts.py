"""A part of the user's own that calls sys.exit ends no command as if all were well."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_train import run_train

SMALL = ("data.sequence_length=32", "data.global_batch_size=2", "train.steps=1", "tracker=jsonl", "quant=w8a8")
LEAVING = """
import sys
from rotexp.optim.cayley_sgd import CayleySGD

class InInit:
    def __init__(self, params):
        sys.exit(0)

class InStep(CayleySGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
    def step(self):
        sys.exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "leaving.py").write_text(LEAVING)
    (tmp_path / "optimizer").mkdir()
    for name in ("InInit", "InStep"):
        (tmp_path / "optimizer" / f"{name}.yaml").write_text(f"_target_: leaving.{name}\n")
    return tmp_path


def test_one_that_exits_when_it_is_made_is_a_wrong_request(folder: Path) -> None:
    ended = run_train(folder / "run", "--config-dir", ".", "plugins=[leaving]", "optimizer=InInit", *SMALL, cwd=folder)
    assert (ended.code, ended.errors.count("\n")) == (2, 1)
    assert "optimizer._target_=leaving.InInit: cannot be made of its options (SystemExit: 0)" in ended.errors
    assert not ended.folder.exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_exits_in_a_run_fails_it(folder: Path, ranks: int) -> None:
    given = ("--config-dir", ".", "plugins=[leaving]", "optimizer=InStep", *SMALL, f"launch.nproc={ranks}")
    ended = run_train(folder / "run", *given, cwd=folder)
    assert ended.code == 1, ended.errors
    assert ended.summary["status"] == "failed"
    assert "phase train: SystemExit: 0" in ended.summary["error"]
    assert ended.left_behind == []
