"""A run without R1 trains a tied head and its embedding as one weight on two ranks, and resumes and exports it so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_train import Run, run_train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

TIED = [
    "train.steps=4",
    "train.checkpoint_every=2",
    "train.keep_checkpoints=3",
    "rotation.r1=false",
    "train.params=all",
    "ema.decay=0.5",
    "adamw.lr=1e-3",
    "sharding=full",
    "sync_mode=universal",
    "tracker=jsonl",
]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def tied(small: list[str]) -> list[str]:
    """The overrides of four steps on two ranks."""
    return [*(override for override in small if not override.startswith("train.steps=")), *TIED]


@pytest.fixture(scope="module")
def run(tied: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of them."""
    ended = run_train(tmp_path_factory.mktemp("tied") / "run", *tied)
    assert (ended.code, ended.errors) == (0, "")
    return ended


def command(module: str, *arguments: str) -> str:
    ended = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_the_weight_is_trained_and_written_once(run: Run, checkpoint: Path) -> None:
    for name in ("weights", "weights_average"):
        weights = load_file(run.folder / f"{name}.safetensors")
        assert HEAD not in weights
        assert not torch.equal(weights[EMBEDDING], load_file(checkpoint / "model.safetensors")[EMBEDDING])
    assert run.summary["sharding"]["effective"]["bytes_full"] == sum(t.nbytes for t in _source(checkpoint).parameters())


def _source(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_two_steps_and_two_are_four(run: Run, tied: list[str], tmp_path: Path) -> None:
    begun = tmp_path / "begun" / "checkpoints"
    begun.mkdir(parents=True)
    shutil.copytree(run.folder / "checkpoints" / "step-00000002", begun / "step-00000002")
    resumed = run_train(tmp_path / "resumed", *tied, f"resume={begun.parent}")
    assert (resumed.code, resumed.errors) == (0, "")
    for name in ("weights", "weights_average", "rotations"):
        expected, found = (load_file(each.folder / f"{name}.safetensors") for each in (run, resumed))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_the_export_is_tied_and_holds_what_was_trained(run: Run, tmp_path: Path) -> None:
    command("rotexp.export", f"run={run.folder}", f"export.path={tmp_path / 'plain'}")
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    assert HEAD not in stored
    assert torch.equal(stored[EMBEDDING], load_file(run.folder / "weights.safetensors")[EMBEDDING])
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["tie_word_embeddings"] is True
    reloaded = _source(tmp_path / "plain")
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight


def test_the_run_is_measured_again_as_it_was(run: Run, tmp_path: Path) -> None:
    command("rotexp.evaluate", f"run={run.folder}", f"out={tmp_path / 'out.json'}")
    again = json.loads((tmp_path / "out.json").read_text())["evaluation"]
    for row in ("float", "quantized", "trained"):
        assert again[row]["perplexity"] == pytest.approx(run.perplexities[row], rel=1e-4)


def test_the_groups_of_student_and_teacher_are_said_and_kept(run: Run, checkpoint: Path) -> None:
    """Two layers, embedding with head, and the root: of the model that is trained, and of the float one beside it."""
    for name in (str(checkpoint), f"{checkpoint} (teacher)"):
        assert f"sync_mode=universal: 4 parameter groups of {name} are guarded" in run.output
        assert run.summary["sync"]["groups"][name] == 4
    assert run.summary["sync"]["num_groups"] == 8
