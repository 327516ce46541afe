"""Two optimizers make one step, on one schedule; their state goes on where another process left it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotexp.config.components import Component
from rotexp.config.schema import Config
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.optim.options import CayleySGDConfig
from rotexp.optim.protocol import state_bytes
from rotexp.training.optimizers import Optimizers, adamw
from rotexp.training.options import AdamWConfig, LrSchedule, TrainConfig

CONFIG = Config(
    optimizer=CayleySGDConfig(lr=0.2, momentum=0.5),
    adamw=AdamWConfig(lr=1e-2, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1),
    train=TrainConfig(steps=6, lr_schedule=LrSchedule.linear, warmup_steps=2),
)


def parameters(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0].contiguous()
    weights = {"weight": (3, 4), "gain": (4,)}
    return (
        {"R1": nn.Parameter(rotation)},
        {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in weights.items()},
    )


def give_gradients(tensors: dict[str, Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for tensor in tensors.values():
        tensor.grad = torch.randn(tensor.shape, generator=generator)


def advance(optimizers: Optimizers, rotations: dict[str, Tensor], weights: dict[str, Tensor], step: int) -> None:
    give_gradients(rotations | weights, step)
    optimizers.step()
    optimizers.schedule()
    optimizers.zero_grad()


def test_rotations_follow_their_optimizer_and_weights_adamw() -> None:
    """Of each, the same steps by itself, at rates that the linear schedule with two steps of warm-up says."""
    rotations, weights = parameters()
    expected_rotations, expected_weights = parameters()
    optimizers = Optimizers(rotations, weights, CONFIG)
    cayley = CayleySGD(expected_rotations.values(), lr=0.2, momentum=0.5)
    adam = torch.optim.AdamW(expected_weights.values(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for step, share in enumerate([0.0, 0.5, 1.0, 0.75, 0.5, 0.25]):
        assert optimizers.learning_rates() == pytest.approx({"train/lr": 0.2 * share, "train/lr_weights": 1e-2 * share})
        cayley.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.2 * share, 1e-2 * share
        give_gradients(expected_rotations | expected_weights, step)
        cayley.step()
        adam.step()
        advance(optimizers, rotations, weights, step)
    for name, expected in (expected_rotations | expected_weights).items():
        torch.testing.assert_close((rotations | weights)[name], expected, rtol=0, atol=1e-6)


def test_gradients_are_forgotten() -> None:
    rotations, weights = parameters()
    optimizers = Optimizers(rotations, weights, CONFIG)
    advance(optimizers, rotations, weights, 0)
    assert all(tensor.grad is None for tensor in (rotations | weights).values())


@pytest.mark.parametrize("kept", ["rotations", "weights"])
def test_either_may_be_absent(kept: str) -> None:
    rotations, weights = parameters()
    given = {"rotations": (rotations, {}), "weights": ({}, weights)}[kept]
    optimizers = Optimizers(*given, CONFIG)
    before = {name: tensor.detach().clone() for name, tensor in (rotations | weights).items()}
    for step in range(2):
        advance(optimizers, *given, step)
    optimizers.project()
    moved = {name for name, tensor in (rotations | weights).items() if not torch.equal(tensor, before[name])}
    assert moved == set(given[0] | given[1])
    assert list(optimizers.learning_rates()) == ["train/lr" if kept == "rotations" else "train/lr_weights"]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_new_process_goes_on_bit_for_bit(momentum: float, first: int) -> None:
    """What goes over is what JSON holds, and tensors that are read into those of the new process."""
    config = Config(adamw=CONFIG.adamw, optimizer=CayleySGDConfig(lr=0.2, momentum=momentum), train=CONFIG.train)
    rotations, weights = parameters()
    straight = Optimizers(rotations, weights, config)
    for step in range(first):
        advance(straight, rotations, weights, step)
    facts: Any = json.loads(json.dumps(straight.facts()))
    saved = {name: tensor.clone() for name, tensor in straight.tensors().items()}
    new_rotations, new_weights = parameters(seed=1)
    for name, tensor in (rotations | weights).items():
        (new_rotations | new_weights)[name].detach().copy_(tensor.detach())
    again = Optimizers(new_rotations, new_weights, config)
    assert again.tensors().keys() == saved.keys()
    assert ("R1/momentum_buffer" in saved) is (momentum > 0)
    for name, tensor in again.tensors().items():
        tensor.copy_(saved[name])
    again.load_facts(facts)
    for step in range(first, 6):
        assert again.learning_rates() == straight.learning_rates()
        advance(straight, rotations, weights, step)
        advance(again, new_rotations, new_weights, step)
    assert again.facts() == straight.facts()
    for name, tensor in (rotations | weights).items():
        assert torch.equal((new_rotations | new_weights)[name], tensor)


def test_rates_follow_the_new_schedule() -> None:
    rotations, weights = parameters()
    saved = Optimizers(rotations, weights, CONFIG)
    for step in range(4):
        advance(saved, rotations, weights, step)
    constant = Config(
        adamw=AdamWConfig(lr=3e-3),
        optimizer=CayleySGDConfig(lr=0.1),
        train=TrainConfig(steps=9, lr_schedule=LrSchedule.constant),
    )
    again = Optimizers(*parameters(), constant)
    again.load_facts(saved.facts())
    assert again.learning_rates() == pytest.approx({"train/lr": 0.1, "train/lr_weights": 3e-3})


def test_moments_are_there_from_the_start_and_shaped_as_the_weights() -> None:
    _, weights = parameters()
    optimizer = adamw(weights, CONFIG.adamw)
    for weight in weights.values():
        state = optimizer.state[weight]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(state[name].shape == weight.shape and not state[name].any() for name in ("exp_avg", "exp_avg_sq"))


def test_the_facts_of_checkpoints_of_before_are_read() -> None:
    """They held counts of steps alone, and the state of torch's schedulers."""
    rotations, weights = parameters()
    saved = Optimizers(rotations, weights, CONFIG)
    for step in range(4):
        advance(saved, rotations, weights, step)
    again = Optimizers(*parameters(), CONFIG)
    schedulers = [{"last_epoch": 4, "_step_count": 5, "base_lrs": [0.2], "_last_lr": [0.1]}] * 2
    again.load_facts({"steps": {"R1": 4}, "schedulers": schedulers})
    assert again.facts() == saved.facts() == {"numbers": {"R1": {"step": 4}}, "scheduled": 4}
    assert again.learning_rates() == saved.learning_rates()


class Averaging(CayleySGD):
    """Keeps a tensor and a number of its own."""

    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return super().initial_state(rotation) | {"average": torch.zeros(3, dtype=torch.float64), "scale": 1.0}


def test_state_of_ones_own_goes_over_and_is_counted() -> None:
    own = Component("averaging", f"{__name__}.Averaging", {"lr": 0.1, "momentum": 0.5})
    config = Config(optimizer=own, train=CONFIG.train)
    rotations, _ = parameters()
    saved = Optimizers(rotations, {}, config)
    saved.rotations.state[rotations["R1"]]["scale"] = 0.25  # type: ignore[union-attr]
    saved.tensors()["R1/average"].fill_(7.0)
    again_rotations, _ = parameters()
    again = Optimizers(again_rotations, {}, config)
    for name, tensor in again.tensors().items():
        tensor.copy_(saved.tensors()[name])
    again.load_facts(json.loads(json.dumps(saved.facts())))
    assert again.tensors()["R1/average"].tolist() == [7.0] * 3
    assert again.facts()["numbers"] == {"R1": {"step": 0, "scale": 0.25}}
    assert state_bytes(again.rotations, again_rotations["R1"]) == 4 * 16 + 8 * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("momentum", "uses"), [(0.0, False), (0.5, True)])
def test_an_optimizer_says_whether_the_length_of_gradients_matters(momentum: float, uses: bool) -> None:
    rotations, weights = parameters()
    config = Config(optimizer=CayleySGDConfig(lr=0.2, momentum=momentum), train=CONFIG.train)
    assert Optimizers(rotations, {}, config).uses_gradient_length is uses
    assert Optimizers({}, weights, CONFIG).uses_gradient_length
