"""A stored model's structure is built and placed in one place, and alike for every command."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rotexp.config.schema import Config
from rotexp.models.load import open_checkpoint
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.building import build_for_run, build_placed, build_plain
from rotexp.training.options import Trainable, TrainConfig

ROOT = Path(__file__).parents[2]
CHAIN = {"build_model", "place", "checkpoint_layers", "train_also"}
"""What has to be done in one order, and was done in five places before."""

CHECKPOINT = open_checkpoint(ModelConfig("random", ModelSource.random, size="nano"), seed=0)
QUANT = QuantConfig("w4", weights=QuantSpec(4))


def called(text: str) -> Iterator[str]:
    """Yield the name of every function that a module calls."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name


def test_models_are_built_and_placed_in_one_module() -> None:
    files = {*(ROOT / "rotexp").rglob("*.py"), *(ROOT / "benchmarks").glob("*memory*.py")}
    users = {file.name for file in files if CHAIN & {*called(file.read_text(encoding="utf-8"))}}
    assert users == {"building.py", "own_model.py"}, "own_model.py places in a model that its user built"


def test_a_call_elsewhere_would_be_found() -> None:
    assert CHAIN & {*called("def f(x):\n    return placement.place(build_model(x))")} == {"place", "build_model"}


@pytest.mark.parametrize("params", Trainable)
def test_a_run_s_model_is_the_placed_one_in_which_what_is_named_trains(params: Trainable) -> None:
    config = Config(quant=QUANT, train=TrainConfig(params=params), seed=3)
    found = build_for_run(CHECKPOINT, config, dtype=torch.float32)
    placed = build_placed(CHECKPOINT, config.rotation, QUANT, dtype=torch.float32, seed=3)
    assert found.placements == placed.placements
    assert [*map(repr, found.rotated_modules)] == [*map(repr, placed.rotated_modules)]
    rotations, expected = dict(found.bank.items()), dict(placed.bank.items())
    assert [*rotations] == [*expected]
    assert all(torch.equal(rotations[name], expected[name]) for name in expected)
    trains = {name.rpartition(".")[0].rpartition(".")[2] for name in found.trained_names}
    anything = {
        Trainable.rotations: set(),
        Trainable.rotations_and_norms: {"input_layernorm", "post_attention_layernorm", "norm"},
    }
    assert trains == anything.get(params, trains)
    assert bool(trains) == (params is not Trainable.rotations)


def test_a_plain_model_is_frozen_and_neither_rotated_nor_quantized() -> None:
    plain = build_plain(CHECKPOINT, dtype=torch.bfloat16)
    assert (plain.rotated_modules, plain.hooked, [*plain.bank.items()]) == ([], [], [])
    parameters = [*plain.network.parameters()]
    assert {(weight.dtype, weight.is_meta, weight.requires_grad) for weight in parameters} == {
        (torch.bfloat16, True, False)
    }
