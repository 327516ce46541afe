"""Clipping acts on gradients whose length means something, and whether it does is what steps show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rotexp.config.schema import Config
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.optim.options import CayleySGDOptions, StepRule
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.trainable import train_also
from rotexp.sharding.communication import Communication
from rotexp.training.coordinator import Coordinator
from rotexp.training.loop import _rates
from rotexp.training.options import Trainable

Factory = Callable[..., Any]


def moved(options: CayleySGDOptions, *lengths: float) -> torch.Tensor:
    """Return a rotation of order 64 after a step for each length, all along gradients of one direction each."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.nn.Parameter(torch.eye(64))
    given = {name: getattr(options, name) for name in ("lr", "momentum", "step_rule")}
    optimizer = CayleySGD([rotation], **given)
    for length in lengths:
        rotation.grad = length * torch.randn(64, 64, generator=generator)
        optimizer.step()
    return rotation.detach()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rule", StepRule)
def test_the_options_know_whether_the_length_of_a_gradient_matters(rule: StepRule, momentum: float) -> None:
    """Under the paper's rule at a learning rate that its bound does not replace."""
    lr = 1e-3 if rule is StepRule.paper else CayleySGDOptions.lr
    options = CayleySGDOptions(lr=lr, step_rule=rule, momentum=momentum)
    long, short = moved(options, 1e-2, 1e-2), moved(options, 1e-2, 1e-4)
    same = bool((long - short).abs().max() < 1e-6)
    assert same is not options.uses_gradient_length


@pytest.fixture
def coordinator(llama: Factory, rotated: Factory) -> Coordinator:
    """That of a small model in which everything is trained, every gradient a random one."""
    config = Config(rotation=RotationConfig(name="learned"))
    model = rotated(llama(), config.rotation, config.quant)
    train_also(model, Trainable.all)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return Coordinator(model.network, Communication())


def norms(coordinator: Coordinator) -> dict[bool, float]:
    """Return the norms of the gradients of rotations (True) and of everything else, in float64."""
    squares = {True: 0.0, False: 0.0}
    for name, parameter in coordinator.model.named_parameters():
        if parameter.grad is not None:
            squares[name.startswith(coordinator.prefix)] += float(parameter.grad.double().square().sum())
    return {rotations: square**0.5 for rotations, square in squares.items()}


@pytest.mark.parametrize("with_rotations", [True, False])
def test_only_what_is_clipped_counts(coordinator: Coordinator, with_rotations: bool) -> None:
    before = norms(coordinator)
    joint = (before[True] ** 2 + before[False] ** 2) ** 0.5
    found = coordinator.clip(1.0, with_rotations=with_rotations)
    assert found.total.item() == pytest.approx(joint, rel=1e-5)
    after = norms(coordinator)
    assert after[False] == pytest.approx(before[False] / joint if with_rotations else 1.0, rel=1e-5)


def test_rotations_alone_are_left_as_they_are_where_their_length_means_nothing(coordinator: Coordinator) -> None:
    for name, parameter in coordinator.model.named_parameters():
        if not name.startswith(coordinator.prefix):
            parameter.grad = None
    before = norms(coordinator)
    coordinator.clip(1.0, with_rotations=False)
    assert norms(coordinator) == before


@pytest.mark.parametrize(
    ("params", "rule", "tensor", "keys"),
    [
        ("rotations", "angle", "bank.R1", ["optimizer.lr"]),
        ("rotations", "angle", None, ["optimizer.lr"]),
        ("rotations", "paper", "bank.R1", ["optimizer.lr", "train.max_grad_norm"]),
        ("all", "angle", "bank.R1", ["optimizer.lr"]),
        ("all", "angle", "lm_head.weight", ["adamw.lr", "train.max_grad_norm"]),
        ("all", "angle", None, ["optimizer.lr", "adamw.lr", "train.max_grad_norm"]),
        ("rotations_and_norms", "angle", "norm.weight", ["adamw.lr", "train.max_grad_norm"]),
        ("rotations_and_scales", "angle", "quantizer_scales.q", ["adamw.scales_lr", "train.max_grad_norm"]),
    ],
)
def test_advice_names_the_rate_of_the_parameter_it_is_about(
    params: str, rule: str, tensor: str | None, keys: list[str]
) -> None:
    options = CayleySGDOptions(step_rule=StepRule[rule])
    config = Config(optimizer=options)
    config = replace(config, train=replace(config.train, params=Trainable[params]))
    assert _rates(tensor, config, rotations="bank.", uses_length=options.uses_gradient_length) == keys
    unclipped = replace(config, train=replace(config.train, max_grad_norm=None))
    found = _rates(tensor, unclipped, rotations="bank.", uses_length=options.uses_gradient_length)
    assert found == [key for key in keys if key != "train.max_grad_norm"]
