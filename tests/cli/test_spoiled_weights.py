"""A weight that is not finite ends training on two ranks, measuring and export in one line that names it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from run_train import run_train
from safetensors.torch import load_file, save_file

from rotexp.evaluate import main as evaluate
from rotexp.export import main as export

pytestmark = pytest.mark.slow

UNSEEN_ROW = 2047
"""A token that no text of the tests meets."""


@pytest.fixture
def untied(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint with a head of its own, so that a row of the embedding shows nowhere else."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    return folder


def spoil(folder: Path) -> str:
    """Spoil the embedding's last row; return what a command must say of it."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][UNSEEN_ROW, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    where = f"model.path={folder}: model.embed_tokens.weight in model.safetensors"
    return f"{where} holds nan (row {UNSEEN_ROW}); fetch the model again, or repair it"


@pytest.mark.parametrize("sharding", ["full", "no_shard"])
def test_training_ends_on_all_ranks_with_one_line(
    sharding: str, untied: Path, small: list[str], tmp_path: Path
) -> None:
    said = spoil(untied)
    kept = [override for override in small if not override.startswith("model.path=")]
    world = ["launch=elastic", "launch.nproc=2", f"sharding={sharding}", "tracker=jsonl"]
    run = run_train(tmp_path / "run", *kept, f"model.path={untied}", *world)
    assert (run.code, run.left_behind) == (1, [])
    (line,) = run.errors.splitlines()
    assert f"phase shard: ValueError: {said} (see " in line
    assert (run.summary["status"], run.rows) == ("failed", [row for row in run.rows if row["step"] == 0])


def test_measuring_and_exporting_refuse_it_and_write_nothing(
    untied: Path,
    small: list[str],
    own_logging: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = [override for override in small if not override.startswith(("model.path=", "train.steps="))]
    run = run_train(tmp_path / "run", *kept, f"model.path={untied}", "train.steps=0", "tracker=jsonl")
    assert (run.code, run.errors) == (0, "")
    said = spoil(untied)
    out = tmp_path / "out"
    measured = [override for override in kept if override.startswith(("data", "evaluation"))]
    for command, arguments in (
        (evaluate, [f"run={run.folder}", f"out={out}"]),
        (evaluate, ["model=hf", f"model.path={untied}", *measured, f"out={out}"]),
        (export, [f"run={run.folder}", f"export.path={out}"]),
    ):
        monkeypatch.setattr(sys, "argv", ["rotexp", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command()
        assert (end.value.code, capsys.readouterr().err) == (2, f"rotexp: {said}\n")
        assert not out.exists()
