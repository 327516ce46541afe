"""A loss or a gradient that is not finite on one rank alone ends the run, or its step, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_train import Run, run_train, saved_tensors
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

FAULTY = """
import math, os
from rotexp.training.objectives import CrossEntropy
KIND, RANK = {kind!r}, {rank!r}
whole, calls = CrossEntropy.__call__, []
def spoiled(gradient):
    spoilt = gradient.clone()
    spoilt.view(-1)[3] = math.inf
    return spoilt
def objective(self, model, token_ids, *, teacher):
    calls.append(1)
    loss = whole(self, model, token_ids, teacher=teacher)
    if len(calls) != 2 or os.environ.get("RANK", "0") != RANK:
        return loss
    if KIND == "loss":
        return loss * math.nan
    parameter = model.network.get_parameter(KIND)
    hook = lambda gradient: (handle.remove(), spoiled(gradient))[1]
    handle = parameter.register_hook(hook)
    return loss
CrossEntropy.__call__ = objective
if __name__ == "__main__":
    from rotexp.train import main
    main()
"""
"""Runs the command; the second loss of one rank, or the gradient of one parameter there, is spoiled."""

Faulty = Callable[..., Run]


@pytest.fixture
def faulty(small: list[str], tmp_path: Path) -> Faulty:
    def run(*arguments: str, kind: str, rank: int) -> Run:
        program = tmp_path / "faulty.py"
        program.write_text(FAULTY.format(kind=kind, rank=str(rank)))
        kept = [override for override in small if not override.startswith("train.steps=")]
        given = [*kept, "train.steps=3", "train.checkpoint_every=1", "tracker=jsonl"]
        return run_train(tmp_path / "run", *given, "train.keep_checkpoints=3", *arguments, program=(str(program),))

    return run


def rotations_after(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Read the rotations of a checkpoint."""
    return {name: tensor for name, tensor in saved_tensors(folder, step).items() if name.startswith("rotations/")}


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_its_checkpoint(faulty: Faulty) -> None:
    ended = faulty("train.max_grad_norm=0.5", kind="loss", rank=0)
    assert (ended.code, ended.left_behind) == (1, [])
    (line,) = ended.errors.splitlines()
    assert "phase train: FloatingPointError: step 2: the gradient of" in line
    assert "is not finite (loss nan)" in line
    assert "; lower optimizer.lr, or go on by train.on_nonfinite=skip" in line
    assert "warning: train.max_grad_norm=0.5 changes nothing: a step of optimizer=cayley_sgd" in ended.output
    assert ended.summary["status"] == "failed"
    assert [row["step"] for row in ended.steps] == [1]
    assert [path.name for path in ended.folder.glob("checkpoints/step-*")] == ["step-00000001"]


@pytest.mark.parametrize(
    ("sharding", "name"),
    [("full", "rotation_bank.R2_1"), ("zero2_master", "model.layers.1.mlp.up_proj.weight")],
)
def test_a_gradient_of_one_rank_is_named_by_all(faulty: Faulty, sharding: str, name: str) -> None:
    ended = faulty(f"sharding={sharding}", "train.params=all", kind=name, rank=1)
    assert (ended.code, ended.left_behind) == (1, [])
    assert f"step 2: the gradient of {name} is not finite (loss " in ended.summary["error"]
    assert "loss nan" not in ended.summary["error"]
    rates = "optimizer.lr" if "rotation_bank" in name else "adamw.lr or train.max_grad_norm"
    assert f"; lower {rates}, or go on by train.on_nonfinite=skip" in ended.summary["error"]
    for rank in range(2):
        log = (ended.folder / f"rank-{rank}.log").read_text()
        assert f"step 2: the gradient of {name} is not finite" in log


def test_a_skipped_step_changes_nothing_and_is_counted(faulty: Faulty) -> None:
    ended = faulty("sharding=full", "train.on_nonfinite=skip", kind="rotation_bank.R2_1", rank=1)
    assert (ended.code, ended.left_behind) == (0, [])
    assert "step 2: the gradient of rotation_bank.R2_1 is not finite" in ended.errors
    assert "the step is skipped" in ended.errors
    assert [row["train/num_skipped"] for row in ended.steps] == [0, 1, 1]
    assert [row["grad_norm/total"] for row in ended.steps][1] == "inf"
    assert ended.summary["train"]["skipped"] == [2]
    assert ended.summary["replica"]["max_abs_diff"] == 0.0
    first, second, third = (rotations_after(ended.folder, step) for step in (1, 2, 3))
    for name, matrix in first.items():
        assert torch.equal(second[name], matrix)
        assert not torch.equal(third[name], matrix)
        assert third[name].isfinite().all()
    assert load_file(ended.folder / "rotations.safetensors")["R1"].isfinite().all()
