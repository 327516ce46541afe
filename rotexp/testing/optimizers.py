"""Check that an optimizer of rotations keeps them orthogonal, descends, and can be scheduled, saved and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rotexp.optim.protocol import ManifoldOptimizer, state_bytes
from rotexp.orthogonal.stiefel import cayley_exact
from rotexp.rotation.start import draw_start
from rotexp.testing.rules import check_members, disturb, rule
from rotexp.training.parts import fault_of_optimizer

SHAPES = ((64, 64), (256, 256), (3, 32, 32))
STEPS = 100
DRIFT = 1e-4
"""Largest |R Rᵀ − I| after so many steps."""
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}
"""The same after `project`, by the dtypes in which rotations are held."""
STILL = 1e-5
"""How far a learning rate of zero may move an entry in float32."""
NEAR = 0.1
"""Farthest that `project` may move an entry of a matrix that is 0.01 from orthogonal."""
DESCENT = 1e-3
"""Share of the loss that the steps must take away at least."""

Make = Callable[[list[Tensor]], Any]


def check_optimizer(cls: type[Any], **options: Any) -> None:
    """Let an optimizer move rotations of orders 64 and 256 and a stack of blocks, float32 and float64, on the CPU.

    The gradient of each has length 1, as `train.max_grad_norm` leaves it at most, and the options are those of a run:
    a learning rate that is far too large or too small for it is found.

    Args:
        cls: called as `cls(rotations, **options)`, see `rotexp.optim.protocol.ManifoldOptimizer`.

    Raises:
        AssertionError: naming the rule that is broken.
    """

    def make(rotations: list[Tensor]) -> Any:
        with rule("cls(rotations, **options)"):
            return cls(rotations, **options)

    _check_form(make)
    _check_same_bits(make)
    _check_skips(make)
    _check_rates(make)
    for dtype, exact in EXACT.items():
        _check_state(make, dtype)
        _check_goes_on(make, dtype)
        _check_projects(make, dtype, exact)
        for shape in SHAPES:
            _check_descends(make, shape, dtype)


class _Problem:
    """Rotations of given shapes on the way to others: the loss is ½ Σ ‖R − T‖² / √n, its gradient of length 1."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.rotations: list[Tensor] = []
        self.goals: list[Tensor] = []
        for index, shape in enumerate(shapes):
            start = draw_start("random", shape, name=f"R{index}", seed=0).to(dtype)
            noise = draw_start("random", shape, name=f"noise{index}", seed=0).to(dtype)
            self.goals.append(cayley_exact(noise - noise.mT, start))
            self.rotations.append(nn.Parameter(start))

    def loss(self) -> float:
        pairs = zip(self.rotations, self.goals, strict=True)
        return sum((rotation - goal).square().sum().item() for rotation, goal in pairs)

    def step(self, optimizer: ManifoldOptimizer, times: int = 1) -> None:
        for _ in range(times):
            for rotation, goal in zip(self.rotations, self.goals, strict=True):
                gradient = rotation.detach() - goal
                rotation.grad = gradient / gradient.norm().clamp(min=1e-6)
            with rule("step"):
                optimizer.step()
            for rotation, goal in zip(self.rotations, self.goals, strict=True):
                same = rotation.dtype == goal.dtype
                assert same, f"step: leaves rotations of {goal.dtype} as {rotation.dtype}"
            optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        return [rotation.detach().clone() for rotation in self.rotations]


def _opened(make: Make, problem: _Problem) -> Any:
    """Return an optimizer with its state there from the start, as a run has it."""
    optimizer = make(problem.rotations)
    for rotation in problem.rotations:
        with rule("initial_state"):
            optimizer.state[rotation] = optimizer.initial_state(rotation)
    return optimizer


def _check_form(make: Make) -> None:
    problem = _Problem((8, 8))
    optimizer = make(problem.rotations)
    check_members(optimizer, ManifoldOptimizer)
    with rule("initial_state"):
        fault = fault_of_optimizer(optimizer, problem.rotations[0])
    assert not fault, f"cls(rotations, **options): {fault}"
    problem.rotations[0].grad = torch.ones(8, 8)
    with rule("zero_grad"):
        optimizer.zero_grad()
    gradient = problem.rotations[0].grad
    assert gradient is None or not gradient.any(), "zero_grad: leaves a gradient that is not zero"


def _check_state(make: Make, dtype: torch.dtype) -> None:
    """Check that what is kept of a rotation is what was said, on the meta device too."""
    problem = _Problem((8, 8), (2, 4, 4), dtype=dtype)
    optimizer = _opened(make, problem)
    stated = [_forms(optimizer.state[rotation]) for rotation in problem.rotations]
    problem.step(optimizer, 3)
    found = [_forms(optimizer.state[rotation]) for rotation in problem.rotations]
    assert found == stated, f"initial_state: says {stated[0]}, and after 3 steps state holds {found[0]}"
    empty: list[Tensor] = [nn.Parameter(rotation.detach().to("meta")) for rotation in problem.rotations]
    with rule("initial_state on the meta device"):
        said = state_bytes(make(empty), empty[0])
    held = sum(value.nbytes for value in optimizer.state[problem.rotations[0]].values() if isinstance(value, Tensor))
    assert said == held, f"initial_state: is of {said} bytes on the meta device, and {held} are held"


def _forms(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
        for key, value in sorted(state.items())
    }


def _check_same_bits(make: Make) -> None:
    ends = []
    for seed in (1, 2):
        disturb(seed)
        problem = _Problem((32, 32), (3, 16, 16))
        problem.step(_opened(make, problem), 5)
        ends.append(problem.values())
    assert _equal(*ends), "step: the same steps give other bits; draw nothing from global generators, as ranks do not"


def _check_skips(make: Make) -> None:
    problem = _Problem((16, 16), (16, 16))
    optimizer = _opened(make, problem)
    before = problem.values()
    problem.rotations[0].grad = -problem.goals[0] / 4.0
    with rule("step, where a rotation has no gradient"):
        optimizer.step()
    moved, stayed = (rotation.detach() for rotation in problem.rotations)
    assert torch.equal(stayed, before[1]), "step: moves a rotation that has no gradient"
    assert not torch.equal(moved, before[0]), "step: does not move a rotation that has a gradient"


def _check_rates(make: Make) -> None:
    """Check that the learning rate is that of the groups at every step: none moves nothing, half moves otherwise."""
    moved = []
    for share in (0.0, 0.5, 1.0):
        problem = _Problem((32, 32))
        optimizer = _opened(make, problem)
        problem.step(optimizer)
        before = problem.values()[0]
        for group in optimizer.param_groups:
            group["lr"] *= share
        problem.step(optimizer)
        moved.append(problem.values()[0] - before)
    still, half, whole = moved
    assert still.abs().max() <= STILL, "step: moves a rotation although param_groups say lr=0"
    assert not torch.equal(half, whole), "step: moves as far at half the lr of param_groups; read it in every step"


def _check_goes_on(make: Make, dtype: torch.dtype) -> None:
    """Check that a new process goes on with the same bits from tensors that are copied and numbers that JSON holds."""
    straight, again = (_Problem((32, 32), (2, 16, 16), dtype=dtype) for _ in range(2))
    optimizer = _opened(make, straight)
    straight.step(optimizer, 3)
    resumed = _opened(make, again)
    for ours, theirs in zip(again.rotations, straight.rotations, strict=True):
        ours.detach().copy_(theirs.detach())
        state = resumed.state[ours]
        for key, value in optimizer.state[theirs].items():
            if isinstance(value, Tensor):
                state[key].copy_(value)
            else:
                state[key] = json.loads(json.dumps(value))
    straight.step(optimizer, 3)
    again.step(resumed, 3)
    same = _equal(straight.values(), again.values())
    assert same, "state: what it holds does not say how to go on; keep there what later steps depend on"


@torch.no_grad()
def _check_projects(make: Make, dtype: torch.dtype, exact: float) -> None:
    problem = _Problem((32, 32), (3, 16, 16), dtype=dtype)
    optimizer = _opened(make, problem)
    generator = torch.Generator().manual_seed(0)
    for rotation in problem.rotations:
        rotation.add_(torch.randn(rotation.shape, generator=generator, dtype=dtype) * 1e-2)
    before = problem.values()
    with rule("project"):
        optimizer.project()
    for rotation, was in zip(problem.rotations, before, strict=True):
        error = _drift(rotation)
        assert error <= exact, f"project: leaves a matrix {error:.1e} from orthogonal; at most {exact} in {dtype}"
        assert (rotation - was).abs().max() <= NEAR, "project: replaces a matrix by one that is far from it"


def _check_descends(make: Make, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    problem = _Problem(shape, dtype=dtype)
    optimizer = _opened(make, problem)
    before = problem.loss()
    problem.step(optimizer, STEPS)
    error = _drift(problem.rotations[0])
    assert error <= DRIFT, f"step: after {STEPS} a rotation {shape} is {error:.1e} from orthogonal, more than {DRIFT}"
    fall = 1.0 - problem.loss() / before
    assert fall >= DESCENT, f"step: lowers the loss of a rotation {shape} by {fall:.1%} in {STEPS} steps; change lr"


def _drift(rotation: Tensor) -> float:
    exact = rotation.detach().double()
    identity = torch.eye(rotation.shape[-1], dtype=torch.float64)
    error: float = (exact @ exact.mT - identity).abs().max().item()
    return error if error == error else float("inf")  # nan is the farthest


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))
