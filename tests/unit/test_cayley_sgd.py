"""Checks CayleySGD against a plain numpy version of the published algorithm and against what it promises."""

import io
import itertools
import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.linalg  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.nn import Parameter

from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.optim.options import FIXED_POINT_ERROR, CayleySGDOptions, Solver, StepRule
from rotexp.orthogonal import stiefel

SEEDS = range(3)
PAPER = {"lr": 1.5, "step_rule": "paper"}


def random_rotation(size: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return rotation.contiguous().to(dtype)


def random_gradients(count: int, size: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, size, size, generator=torch.Generator().manual_seed(99 + seed)).to(dtype)


def run(start: Tensor, gradients: Tensor, **options: Any) -> list[Tensor]:
    parameter = Parameter(start.clone())
    optimizer = CayleySGD([parameter], **options)
    trajectory = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        trajectory.append(parameter.detach().clone())
    return trajectory


def published_algorithm(
    start: np.ndarray, gradients: np.ndarray, *, lr: float, momentum: float, iterations: int
) -> list[np.ndarray]:
    """Algorithm 1 of Li, Li and Todorovic (2020), line by line, with the largest row sum as its norm."""
    point, buffer, trajectory = start, np.zeros_like(start), []
    for gradient in gradients:
        buffer = momentum * buffer - gradient
        auxiliary = buffer @ point.T - 0.5 * point @ (point.T @ buffer @ point.T)
        skew = auxiliary - auxiliary.T
        buffer = skew @ point
        step = min(lr, 2 * 0.5 / (np.abs(skew).sum(axis=1).max() + 1e-8))
        moved = point + step * buffer
        for _ in range(iterations):
            moved = point + step / 2 * skew @ (point + moved)
        point = moved
        trajectory.append(point)
    return trajectory


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("lr", "iterations"), [(1e-3, 2), (10.0, 40)])
def test_paper_rule_without_momentum_is_the_published_algorithm(lr: float, iterations: int, seed: int) -> None:
    start, gradients = random_rotation(14, seed=seed), random_gradients(8, 14, seed=seed)
    options: dict[str, Any] = {
        "step_rule": "paper",
        "solver": "fixed_point",
        "fixed_point_iterations": iterations,
        "retract_every": 0,
    }
    ours = run(start, gradients, lr=lr, **options)
    published = published_algorithm(start.numpy(), gradients.numpy(), lr=lr, momentum=0.0, iterations=iterations)
    for mine, theirs in zip(ours, published, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_momentum_agrees_with_the_published_projection_to_second_order(seed: int) -> None:
    start, gradients = random_rotation(14, seed=seed), random_gradients(5, 14, seed=seed)
    gaps = []
    for lr in (1e-3, 1e-4):
        ours = run(start, gradients, lr=lr, momentum=0.9, step_rule="paper", retract_every=0)[-1].numpy()
        published = published_algorithm(start.numpy(), gradients.numpy(), lr=lr, momentum=0.9, iterations=5)[-1]
        gaps.append(np.abs(ours - published).max() / lr)
    assert gaps[0] < 1e-2
    assert gaps[1] < gaps[0] / 50


@pytest.mark.parametrize("seed", SEEDS)
def test_paper_rule_step_is_bounded_for_any_learning_rate(seed: int) -> None:
    start, gradients = random_rotation(14, seed=seed), random_gradients(1, 14, seed=seed)
    far, farther, near = (run(start, gradients, lr=lr, step_rule="paper")[0] for lr in (1e2, 1e6, 1e-4))
    assert torch.equal(far, farther)
    assert stiefel.largest_rotation_angle(start, far).item() < 2 * math.atan(0.5)
    assert stiefel.largest_rotation_angle(start, near) < stiefel.largest_rotation_angle(start, far)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("lr", "solver"), [(1e-3, "exact"), (0.3, "exact"), (3.0, "exact"), (0.3, "fixed_point")])
def test_angle_rule_turns_the_fastest_plane_by_the_learning_rate(lr: float, solver: str, seed: int) -> None:
    start, gradients = random_rotation(20, seed=seed), random_gradients(3, 20, seed=seed)
    trajectory = [start, *run(start, gradients, lr=lr, solver=solver)]
    for before, after in itertools.pairwise(trajectory):
        phases = np.abs(np.angle(np.linalg.eigvals((after @ before.mT).numpy())))
        assert phases.max() == pytest.approx(lr, rel=0.01)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_angle_rule_ignores_the_scale_of_the_gradient(scale: float) -> None:
    start, gradients = random_rotation(9, seed=0, dtype=torch.float32), random_gradients(2, 9, seed=0).float()
    plain, scaled = (run(start, gradients * factor, lr=0.2)[-1] for factor in (1.0, scale))
    torch.testing.assert_close(plain, scaled, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("step_rule", StepRule)
@pytest.mark.parametrize("solver", Solver)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_zero_gradient_moves_no_bit(step_rule: StepRule, solver: Solver, momentum: float) -> None:
    start = random_rotation(17, seed=0, dtype=torch.float32)
    options: dict[str, Any] = {"step_rule": step_rule, "solver": solver, "momentum": momentum}
    for moved in run(start, torch.zeros(3, 17, 17), lr=0.1, **options):
        assert torch.equal(moved, start)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"lr": 0.1}, 1e-5),
        ({"lr": 1.0}, 1e-5),
        ({"lr": 0.1, "momentum": 0.9}, 1e-5),
        ({"lr": 1e-3, "step_rule": "paper"}, 1e-5),
        ({"lr": 0.1, "solver": "fixed_point"}, 3e-6),
        ({"lr": 1.5, "step_rule": "paper", "solver": "fixed_point"}, 1e-5),
    ],
)
def test_float32_stays_orthogonal_over_200_steps_and_projects_exactly(options: dict[str, Any], bound: float) -> None:
    parameter = Parameter(random_rotation(64, seed=0, dtype=torch.float32))
    optimizer = CayleySGD([parameter], retract_every=0, **options)
    for gradient in random_gradients(200, 64, seed=0, dtype=torch.float32):
        parameter.grad = gradient
        optimizer.step()
    drift = max(error.item() for error in stiefel.orthogonality_error(parameter.detach()))
    assert 2e-7 < drift < bound
    before = parameter.detach().clone()
    optimizer.project()
    assert max(error.item() for error in stiefel.orthogonality_error(parameter.detach())) < 2e-7
    torch.testing.assert_close(parameter.detach(), before, atol=bound, rtol=0.0)


@pytest.mark.parametrize("order", [64, 576])
def test_float32_drifts_by_less_than_1_5e_6_between_two_retractions(order: int) -> None:
    """At the defaults; 576 is the width of SmolLM2-135M."""
    parameter = Parameter(random_rotation(order, seed=0, dtype=torch.float32))
    optimizer = CayleySGD([parameter], lr=CayleySGDOptions.lr, retract_every=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CayleySGDOptions.retract_every):
        parameter.grad = torch.randn(order, order, generator=generator)
        optimizer.step()
    rows, columns = (error.item() for error in stiefel.orthogonality_error(parameter.detach()))
    assert max(rows, columns) < 1.5e-6
    assert rows < 4 * columns


def plane_step(size: int, *, dtype: torch.dtype, **options: Any) -> Tensor:
    """Return where a step leads from the identity if the gradient lies in one coordinate plane, however long it is."""
    gradient = torch.zeros(1, size, size, dtype=dtype)
    gradient[0, 0, 1] = 100.0
    return run(torch.eye(size, dtype=dtype), gradient, **options)[0]


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("iterations", range(1, 9))
def test_no_step_below_the_limit_of_the_fixed_point_leaves_the_group_further_than_it_says(
    iterations: int, size: int
) -> None:
    options = CayleySGDOptions(solver=Solver.fixed_point, fixed_point_iterations=iterations)
    given: dict[str, Any] = {"solver": "fixed_point", "fixed_point_iterations": iterations}
    moved = plane_step(size, dtype=torch.float64, lr=0.9999 * options.lr_limit, **given)
    drift = max(error.item() for error in stiefel.orthogonality_error(moved))
    assert drift <= FIXED_POINT_ERROR
    assert iterations % 2 or drift > 0.9 * FIXED_POINT_ERROR  # odd ones err along the plane's turn, not off the group


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize(("options", "least", "most"), [({"lr": 0.1}, 0.0, 2e-7), (PAPER, 0.01, 2 * 0.5**7)])
def test_five_products_are_as_exact_as_the_options_say(
    options: dict[str, Any], least: float, most: float, size: int
) -> None:
    exact, approximate = (plane_step(size, dtype=torch.float32, solver=solver.name, **options) for solver in Solver)
    assert least <= torch.linalg.matrix_norm(exact - approximate, ord=2).item() <= most
    assert least <= max(error.item() for error in stiefel.orthogonality_error(approximate)) <= most


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{"lr": 1e-3}, {"lr": 1e-4, "step_rule": "paper"}, {"lr": 1e-4, "momentum": 0.5}])
def test_small_steps_descend(options: dict[str, Any], seed: int) -> None:
    data, target = random_gradients(2, 12, seed=seed)
    parameter = Parameter(random_rotation(12, seed=seed))
    optimizer, losses = CayleySGD([parameter], **options), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (parameter @ data - target).tanh().square().sum()
        torch.autograd.backward(loss)
        losses.append(loss.item())
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{"lr": 0.1}, {"lr": 0.1, "solver": "fixed_point"}, {"lr": 0.05, "momentum": 0.5}])
def test_procrustes_recovers_the_rotation(options: dict[str, Any], seed: int) -> None:
    data = random_rotation(12, seed=seed + 20) * torch.linspace(1.0, 2.0, 12)
    truth, parameter = random_rotation(12, seed=seed), Parameter(random_rotation(12, seed=seed + 50))
    if torch.linalg.det(truth) * torch.linalg.det(parameter.detach()) < 0:
        truth[0] *= -1
    optimizer = CayleySGD([parameter], **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    for _ in range(400):
        optimizer.zero_grad()
        torch.autograd.backward((parameter @ data - truth @ data).square().sum())
        optimizer.step()
        scheduler.step()
    assert stiefel.largest_rotation_angle(parameter.detach(), truth).item() < 1e-3


def stepped(parameters: list[Parameter], groups: list[list[Parameter]], *, steps: int) -> None:
    optimizers = [CayleySGD(group, lr=0.1, momentum=0.5, retract_every=2) for group in groups]
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = random_gradients(1, parameter.shape[0], seed=10 * step + index).float()[0]
        for optimizer in optimizers:
            optimizer.step()


def test_batch_equals_one_by_one() -> None:
    sizes = (8, 32, 8, 16, 32, 8)
    together = [Parameter(random_rotation(size, seed=seed).float()) for seed, size in enumerate(sizes)]
    alone = [Parameter(parameter.detach().clone()) for parameter in together]
    stepped(together, [together], steps=3)
    stepped(alone, [[parameter] for parameter in alone], steps=3)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=5e-7, rtol=0.0)


def dense_step(rotation: np.ndarray, gradient: np.ndarray, *, angle: float) -> np.ndarray:
    """Return where an exact step goes that turns the fastest plane by the angle, in float64, by numpy alone."""
    skew = gradient @ rotation.T - rotation @ gradient.T
    largest = scipy.linalg.eigvalsh(skew.T @ skew, subset_by_index=[len(skew) - 1] * 2)[0] ** 0.5
    half = skew * (math.tan(0.5 * angle) / largest)
    identity = np.eye(len(skew))
    moved: np.ndarray = np.linalg.solve(identity + half, (identity - half) @ rotation)
    return moved


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("order", "count"), [(64, 18), (128, 18), (256, 18), (512, 2)])
def test_batches_step_at_the_defaults_with_any_number_of_threads(order: int, count: int) -> None:
    parameters = [Parameter(random_rotation(order, seed=seed).float()) for seed in range(count)]
    optimizer = CayleySGD(parameters, lr=CayleySGDOptions.lr)
    last, expected = parameters[-1], parameters[-1].detach().double().numpy()
    for step in range(2):
        gradients = random_gradients(count, order, seed=step, dtype=torch.float32)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        expected = dense_step(expected, gradients[-1].double().numpy(), angle=CayleySGDOptions.lr)
    # The estimated norm is low by up to 0.5 %, so each step of 0.1 goes at most 0.0005 too far.
    assert scipy.linalg.norm(last.detach().numpy() - expected, 2) < 2 * 0.0005
    errors = stiefel.orthogonality_error(torch.stack([parameter.detach() for parameter in parameters]))
    assert max(error.max().item() for error in errors) < 2e-6


def test_a_wrong_solve_moves_no_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [Parameter(random_rotation(order, seed=seed)) for seed, order in enumerate((70, 70))]
    starts = [parameter.detach().clone() for parameter in parameters]
    for parameter, gradient in zip(parameters, random_gradients(2, 70, seed=0), strict=True):
        parameter.grad = gradient.double()
    monkeypatch.setattr(torch.linalg, "solve_ex", lambda system, target, left: (target.clone(), None))
    with pytest.raises(RuntimeError, match="order 70 is wrong"):
        CayleySGD(parameters, lr=2.0).step()
    monkeypatch.setattr(stiefel, "spectral_norm_skew", lambda generator: torch.full(generator.shape[:-2], 0.1).double())
    with pytest.raises(RuntimeError, match="order 70 is wrong"):
        CayleySGD(parameters, lr=CayleySGDOptions.lr).step()
    assert all(torch.equal(*pair) for pair in zip(parameters, starts, strict=True))


def test_rotations_without_a_gradient_stay_and_keep_their_own_count() -> None:
    first, second = (Parameter(random_rotation(6, seed=seed)) for seed in (0, 1))
    start = second.detach().clone()
    optimizer = CayleySGD([first, second], lr=0.1)
    first.grad = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert torch.equal(second, start)
    second.grad = first.grad.clone()
    optimizer.step()
    assert [optimizer.state[parameter]["step"] for parameter in (first, second)] == [2, 1]
    assert not torch.equal(second, start)


@pytest.mark.parametrize("seed", SEEDS)
def test_momentum_accumulates_skew_generators(seed: int) -> None:
    parameter = Parameter(random_rotation(10, seed=seed))
    optimizer, expected = CayleySGD([parameter], lr=0.2, momentum=0.9, retract_every=2), torch.zeros(10, 10).double()
    for gradient in random_gradients(5, 10, seed=seed):
        expected = 0.9 * expected + stiefel.skew_generator(parameter.detach(), gradient)
        parameter.grad = gradient
        optimizer.step()
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(buffer, -buffer.mT)
        torch.testing.assert_close(buffer, expected)


def test_momentum_changes_the_trajectory_from_the_second_step() -> None:
    start, gradients = random_rotation(10, seed=0), random_gradients(2, 10, seed=0)
    plain, heavy = (run(start, gradients, lr=0.1, momentum=momentum) for momentum in (0.0, 0.9))
    assert torch.equal(plain[0], heavy[0])
    assert (plain[1] - heavy[1]).abs().max().item() > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("step_rule", StepRule)
def test_three_steps_and_three_after_a_reload_equal_six(step_rule: StepRule, momentum: float) -> None:
    start, gradients = random_rotation(16, seed=0).float(), random_gradients(6, 16, seed=0).float()
    options: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "step_rule": step_rule, "retract_every": 4}
    parameter = Parameter(start.clone())
    optimizer = CayleySGD([parameter], **options)
    for index, gradient in enumerate(gradients):
        if index == 3:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            parameter = Parameter(parameter.detach().clone())
            optimizer = CayleySGD([parameter], lr=1.0)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(parameter.detach(), run(start, gradients, **options)[-1])


@pytest.mark.parametrize("retract_every", [0, 1, 3])
def test_retractions_follow_the_schedule(monkeypatch: pytest.MonkeyPatch, retract_every: int) -> None:
    counter = Mock(wraps=stiefel.qr_retraction)
    monkeypatch.setattr(stiefel, "qr_retraction", counter)
    counts = []
    parameter = Parameter(random_rotation(6, seed=0))
    optimizer = CayleySGD([parameter], lr=0.1, retract_every=retract_every)
    for gradient in random_gradients(6, 6, seed=0):
        parameter.grad = gradient
        optimizer.step()
        counts.append(counter.call_count)
    assert counts == [step // retract_every if retract_every else 0 for step in range(1, 7)]


def test_retraction_repairs_drift() -> None:
    start = random_rotation(20, seed=0) * (1 + 1e-4)
    kept, repaired = (run(start, random_gradients(2, 20, seed=0), lr=0.1, retract_every=every)[-1] for every in (0, 2))
    assert stiefel.orthogonality_error(kept)[0].item() > 1e-4
    assert stiefel.orthogonality_error(repaired)[0].item() < 1e-12


def test_closure_is_evaluated_with_gradients_and_returned() -> None:
    parameter = Parameter(random_rotation(5, seed=0))
    start, optimizer = parameter.detach().clone(), CayleySGD([parameter], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter[0].sum()
        torch.autograd.backward(loss)
        return loss.item()

    assert optimizer.step(closure) == start[0].sum().item()
    assert not torch.equal(parameter, start)


def test_groups_have_options_of_their_own_and_a_scheduler_may_reach_zero() -> None:
    fast, slow = (Parameter(random_rotation(6, seed=seed)) for seed in (0, 1))
    starts = [parameter.detach().clone() for parameter in (fast, slow)]
    groups: list[dict[str, Any]] = [{"params": [fast], "lr": 0.4}, {"params": [slow]}]
    optimizer = CayleySGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    fast.grad, slow.grad = random_gradients(2, 6, seed=0)
    optimizer.step()
    angles = [
        stiefel.largest_rotation_angle(start, end.detach()).item()
        for start, end in zip(starts, (fast, slow), strict=True)
    ]
    assert angles == pytest.approx([0.4, 0.1], rel=0.01)
    scheduler.step()
    stopped = fast.detach().clone()
    optimizer.step()
    assert torch.equal(fast, stopped)


SQUARE = torch.eye(4)


@pytest.mark.parametrize(
    ("parameter", "options", "words"),
    [
        (SQUARE, {"lr": 0.0}, ("lr=0.0", "(0, 3.142)")),
        (SQUARE, {"lr": -1.0}, ("lr=-1.0", "(0, 3.142)")),
        (SQUARE, {"lr": math.nan}, ("lr=nan", "(0, 3.142)")),
        (SQUARE, {"lr": math.pi}, ("lr=3.14", "step_rule=paper")),
        (SQUARE, {"lr": 0.5, "solver": "fixed_point"}, ("lr=0.5", "(0, 0.3", "fixed_point_iterations")),
        (SQUARE, {"lr": torch.tensor(0.1)}, ("lr=", "number")),
        (SQUARE, {"momentum": 1.0}, ("momentum=1.0", "[0, 1)")),
        (SQUARE, {"momentum": -0.1}, ("momentum=-0.1", "[0, 1)")),
        (SQUARE, {"step_rule": "fast"}, ("step_rule=fast", "paper, angle")),
        (SQUARE, {"solver": None}, ("solver=None", "exact, fixed_point")),
        (SQUARE, {"fixed_point_iterations": 0}, ("fixed_point_iterations=0", "at least 1")),
        (SQUARE, {"retract_every": -1}, ("retract_every=-1", "at least 0")),
        (SQUARE, {"retract_every": 2.0}, ("retract_every=2.0", "integer")),
        (torch.zeros(3, 4), {}, ("params[0]", "(3, 4)", "square")),
        (torch.zeros(2, 4, 3), {}, ("params[0]", "(2, 4, 3)", "square")),
        (torch.zeros(4), {}, ("params[0]", "(4,)", "square")),
        (torch.zeros(1, 2, 4, 4), {}, ("params[0]", "(1, 2, 4, 4)", "square")),
        (SQUARE.bfloat16(), {}, ("params[0]", "bfloat16", "float32")),
        (SQUARE.to(torch.complex64), {}, ("params[0]", "complex64", "float32")),
        (SQUARE.to_sparse(), {}, ("params[0]", "sparse", "dense")),
        (1.01 * SQUARE, {}, ("params[0]", "not orthogonal", "2.0e-02", "rotexp.random_orthogonal", "polar_projection")),
        (torch.stack([SQUARE, torch.ones(4, 4)]), {}, ("params[0]", "not orthogonal", "4.0e+00")),
        (torch.full((4, 4), math.nan), {}, ("params[0]", "not orthogonal", "nan")),
    ],
)
def test_refusals_name_what_was_wrong(parameter: Tensor, options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refusal:
        CayleySGD([parameter.clone().requires_grad_()], **{"lr": 0.1, **options})
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_refused_group_is_not_added_and_named_by_its_name() -> None:
    optimizer = CayleySGD([("first", Parameter(SQUARE.clone()))], lr=0.1)
    with pytest.raises(ValueError, match="second has shape"):
        optimizer.add_param_group({"params": [("second", Parameter(torch.zeros(2, 3)))]})
    assert len(optimizer.param_groups) == 1


def test_only_matrices_that_are_no_rotations_are_refused_and_by_their_name() -> None:
    good = {f"good{index}": Parameter(random_rotation(8, seed=index)) for index in SEEDS}
    with pytest.raises(ValueError, match=r"^weight is not orthogonal"):
        CayleySGD([*good.items(), ("weight", torch.nn.Linear(8, 8, bias=False, dtype=torch.float64).weight)], lr=0.1)
    drifted = Parameter(random_rotation(8, seed=0, dtype=torch.float32) * 1.001)
    on_meta = Parameter(torch.empty(8, 8, device="meta"))
    assert len(CayleySGD([*good.values(), drifted, on_meta], lr=0.1).param_groups[0]["params"]) == 5


def test_step_refuses_sparse_gradients_and_impossible_rates() -> None:
    parameter = Parameter(SQUARE.clone())
    optimizer = CayleySGD([parameter], lr=0.1)
    parameter.grad = SQUARE.to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 4.0
    with pytest.raises(ValueError, match=r"lr=4\.0"):
        optimizer.step()


def test_options_are_the_arguments_with_the_same_defaults() -> None:
    optimizer = CayleySGD([Parameter(SQUARE.clone())], lr=CayleySGDOptions.lr)
    expected = {**vars(CayleySGDOptions()), "step_rule": "angle", "solver": "exact"}
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected
