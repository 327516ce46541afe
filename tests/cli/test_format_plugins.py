"""Formats of numbers of the user's own: trained, measured again and exported from the folder that holds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_train import Run, run_train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

FORMATS = Path(__file__).parents[2] / "examples" / "plugins" / "formats"
NF4 = ("--config-dir", "conf", "quant=nf4", "plugins=[nf4]")


def run_here(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"rotexp.{command}", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=FORMATS,
        timeout=200,
        env=os.environ | {"COLUMNS": "120"},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run at the defaults, but for the number of steps and of windows."""
    arguments = [*NF4, "train.steps=20", "evaluation.max_windows=16", "tracker=jsonl"]
    run = run_train(tmp_path_factory.mktemp("run") / "nf4", *arguments, cwd=FORMATS)
    assert (run.code, run.errors) == (0, "")
    return run


def test_training_rotations_helps_nf4(trained: Run) -> None:
    perplexities = trained.perplexities
    assert perplexities["float"] < perplexities["trained"] < perplexities["hadamard"]
    kinds = {name: trained.summary["evaluation"][name]["kl"] for name in ("trained", "hadamard")}
    assert kinds["trained"] < kinds["hadamard"]


def test_what_is_recorded_names_the_format_and_grants_nothing(trained: Run) -> None:
    text = (trained.folder / "config.resolved.yaml").read_text(encoding="utf-8")
    assert "_target_: nf4.NF4" in text
    assert "plugins" not in text
    refused = run_here("evaluate", f"run={trained.folder}")
    assert refused.returncode == 2
    assert "quant.weights._target_=nf4.NF4" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_run_is_measured_again(trained: Run) -> None:
    ended = run_here("evaluate", f"run={trained.folder}", "plugins=[nf4]")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert any("│ trained " in line and f"{trained.perplexities['trained']:.2f}" in line for line in _lines(ended))


def test_learned_clip_ratios_are_exported(tmp_path: Path) -> None:
    arguments = [*NF4, "train.params=rotations_and_scales", "train.steps=3", "evaluation.max_windows=1"]
    run = run_train(tmp_path / "run", *arguments, "tracker=jsonl", cwd=FORMATS)
    assert (run.code, run.errors) == (0, "")
    ended = run_here("export", f"run={run.folder}", "plugins=[nf4]", f"export.path={tmp_path / 'model'}")
    assert (ended.returncode, ended.stderr) == (0, "")
    ratios = load_file(tmp_path / "model" / "clip_ratios.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, own in ratios.items():
        outputs, inputs = model.get_submodule(name.removesuffix(".weight")).weight.shape
        assert own.shape == (outputs, inputs // 64)
    assert any((own != 1.0).any() for own in ratios.values())


def test_inspect_calls_the_format_by_its_name() -> None:
    shown = run_here("inspect", *NF4)
    assert (shown.returncode, shown.stderr) == (0, "")
    rows = [line for line in _lines(shown) if "mlp.up_proj" in line]
    assert len(rows) == 1
    assert [cell.strip() for cell in rows[0].split("│")][-3:-1] == ["NF4", "4"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["quant=mxfp4", "plugins=[mxfp4]", "train.params=rotations_and_scales"], "has no scales that can be learned"),
        (["quant=nf4", "plugins=[nf4]", "quant.weights.group_size=50"], "group_size=50 does not divide the width 192"),
        (["quant=nf4"], "quant.weights._target_=nf4.NF4: must be a class of a plug-in"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: list[str], message: str, tmp_path: Path) -> None:
    run = run_train(tmp_path / "run", "--config-dir", "conf", *changes, "train.steps=1", "tracker=jsonl", cwd=FORMATS)
    assert run.code == 2
    assert message in run.errors
    assert run.errors.count("\n") == 1
    assert not run.folder.exists()


def _lines(ended: subprocess.CompletedProcess[str]) -> list[str]:
    return ended.stdout.splitlines()
