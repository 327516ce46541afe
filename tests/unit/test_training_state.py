"""What training keeps: the state with the smallest loss that was taken, and what rotations are like at its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rotexp.config.schema import COMPONENTS, Config
from rotexp.metrics.options import EvaluationConfig
from rotexp.optim.options import CayleySGDConfig
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.trainable import train_also
from rotexp.sharding.communication import Communication
from rotexp.sharding.replicas import Divergence
from rotexp.sharding.split_vector import SplitVector
from rotexp.training.best import Choice
from rotexp.training.options import Trainable, TrainConfig
from rotexp.training.state import TrainingState

Factory = Callable[..., Any]
WEIGHT = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def config() -> Config:
    return Config(
        rotation=RotationConfig(name="learned"),
        optimizer=CayleySGDConfig(),
        objective=COMPONENTS["objective"]["ce"],
        train=TrainConfig(steps=9, params=Trainable.all),
    )


@pytest.fixture
def build(llama: Factory, rotated: Factory) -> Callable[[Config], TrainingState]:
    def state(config: Config) -> TrainingState:
        model = rotated(llama(), config.rotation, config.quant)
        train_also(model, config.train.params)
        return TrainingState(model, config, communication=Communication())

    return state


@torch.no_grad()
def mark(state: TrainingState, value: float) -> None:
    """Let everything trained hold one number."""
    state.model.bank["R1"].fill_(value)
    state.model.network.get_parameter(WEIGHT).fill_(value)


def marks(state: TrainingState) -> set[float]:
    return {float(tensor.mean()) for tensor in (state.best.rotations["R1"], state.best.held[WEIGHT])}


def parts(value: torch.Tensor | SplitVector) -> list[torch.Tensor]:
    return value.tensors if isinstance(value, SplitVector) else [value]


def test_a_skipped_step_is_never_the_best_whatever_its_loss(config: Config, build: Callable[..., Any]) -> None:
    state = build(config)
    for value, (loss, taken) in enumerate([(3.0, True), (1.0, False), (2.0, True), (2.5, True)]):
        mark(state, float(value))
        (state.advance if taken else state.skip)(loss)
    assert state.result.best == Choice(3, 2.0, "train/loss")
    assert marks(state) == {2.0}


def test_held_out_loss_decides_alone_where_it_is_asked_for(config: Config, build: Callable[..., Any]) -> None:
    state = build(replace(config, evaluation=EvaluationConfig(every=2)))
    for value, loss in enumerate([5.0, 4.0, 6.0, math.nan, math.inf]):
        mark(state, float(value))
        state.judge(loss)
        state.advance(-float(value))
    assert state.result.best == Choice(1, 4.0, "eval/loss")
    assert marks(state) == {1.0}


def test_a_checkpoint_carries_what_was_best_and_why(config: Config, build: Callable[..., Any]) -> None:
    state, other = build(config), build(config)
    mark(state, 7.0)
    state.advance(3.0)
    mark(state, 8.0)
    state.advance(4.0)
    saved = state.tensors()
    assert saved[f"best/{WEIGHT}"].tensors[0].mean() == saved["best/R1"].mean() == 7.0
    for name, value in other.tensors().items():
        pairs = (
            zip(value.tensors, saved[name].tensors, strict=True)
            if hasattr(value, "tensors")
            else [(value, saved[name])]
        )
        for own, found in pairs:
            own.data.copy_(found)
    other.loaded(state.facts())
    assert (other.result.best, marks(other)) == (Choice(1, 3.0, "train/loss"), {7.0})
    mark(other, 9.0)
    other.advance(3.5)
    assert marks(other) == {7.0}


def test_what_was_overwritten_before_the_end_is_summarized_all_the_same() -> None:
    last, end = Divergence({"R1": 0.5, "R2_0": 0.25}, ranks=(1,)), Divergence({"R1": 0.125, "frozen": 1.0}, ranks=(2,))
    assert last.joined(end) == Divergence({"R1": 0.125, "R2_0": 0.25, "frozen": 1.0}, ranks=(1, 2))
    assert Divergence().joined(end) == end


def test_a_rotation_that_strays_is_summarized_by_its_own_difference(config: Config, build: Callable[..., Any]) -> None:
    state = build(config)
    state.conclude(Divergence({"R1": 0.25, "R2_1": 0.5, "lm_head.weight": 1.0}, ranks=(1,)))
    found = {row["rotation"]: row["max_abs_diff"] for row in state.result.rotations}
    assert found == dict.fromkeys(state.model.bank.snapshot(), 0.0) | {"R1": 0.25, "R2_1": 0.5}
    assert state.result.divergence.max_abs_diff == 1.0


def test_another_measure_begins_anew(config: Config, build: Callable[..., Any]) -> None:
    """A run that goes on by held-out loss does not compare it with the training loss there was."""
    state = build(config)
    state.advance(1.0)
    judged = build(replace(config, evaluation=EvaluationConfig(every=1)))
    judged.loaded(state.facts())
    mark(judged, 5.0)
    judged.judge(6.0)
    assert (judged.result.best, marks(judged)) == (Choice(1, 6.0, "eval/loss"), {5.0})
