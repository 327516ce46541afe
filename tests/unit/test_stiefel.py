"""Checks the maths of orthogonal matrices against dense float64 formulas of numpy and scipy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg  # type: ignore[import-untyped]
import torch
from torch import Tensor

from rotexp.optim.options import CayleySGDOptions
from rotexp.orthogonal import stiefel

SEEDS = range(4)
SIZES = (1, 2, 5, 16, 33)
PRECISION = {torch.float32: 2e-6, torch.float64: 1e-14}


def random_rotation(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation: Tensor = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))[0]
    return rotation.contiguous().to(dtype)


def random_matrix(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64).to(dtype)


def random_skew(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    matrix = random_matrix(*shape, seed=seed, dtype=dtype)
    return matrix - matrix.mT


def angles_of(turn: Tensor) -> np.ndarray:
    return np.abs(np.angle(np.linalg.eigvals(turn.double().numpy())))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", SIZES)
def test_generator_is_skew_and_gives_the_tangent_gradient(size: int, seed: int) -> None:
    rotation, gradient = random_rotation(3, size, size, seed=seed), random_matrix(3, size, size, seed=seed)
    generator = stiefel.skew_generator(rotation, gradient)
    assert torch.equal(generator, -generator.mT)
    velocity = generator @ rotation
    torch.testing.assert_close(velocity, gradient - rotation @ gradient.mT @ rotation)
    torch.testing.assert_close(rotation.mT @ velocity, -(rotation.mT @ velocity).mT)


@pytest.mark.parametrize("seed", SEEDS)
def test_generator_is_exactly_skew_in_float32(seed: int) -> None:
    rotation = random_rotation(65, 65, seed=seed, dtype=torch.float32)
    generator = stiefel.skew_generator(rotation, random_matrix(65, 65, seed=seed, dtype=torch.float32))
    assert torch.equal(generator, -generator.mT)


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_falls_at_the_documented_rate(seed: int) -> None:
    rotation, gradient = random_rotation(12, 12, seed=seed), random_matrix(12, 12, seed=seed)
    generator, step = stiefel.skew_generator(rotation, gradient), 1e-6
    change = (gradient * (stiefel.cayley_exact(step * generator, rotation) - rotation)).sum() / step
    torch.testing.assert_close(change, -0.5 * generator.square().sum(), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", SIZES)
def test_exact_cayley_is_the_dense_formula(size: int, seed: int) -> None:
    generator, rotation = random_skew(2, size, size, seed=seed), random_rotation(2, size, size, seed=seed)
    moved = stiefel.cayley_exact(generator, rotation)
    for skew, start, end in zip(generator.numpy(), rotation.numpy(), moved.numpy(), strict=True):
        expected = np.linalg.inv(np.eye(size) + skew / 2) @ (np.eye(size) - skew / 2) @ start
        np.testing.assert_allclose(end, expected, atol=1e-11)
    assert max(error.max().item() for error in stiefel.orthogonality_error(moved)) < 1e-12


def batch_of_rotations(count: int, order: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rotations, and their generators as the default rule of a step sizes them."""
    rotations = random_rotation(count, order, order, seed=order, dtype=dtype)
    generators = stiefel.skew_generator(rotations, random_matrix(count, order, order, seed=order, dtype=dtype))
    size = stiefel.angle_step_size(generators, angle=CayleySGDOptions.lr)
    return rotations, generators * size[..., None, None]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("order", "count", "dtype"),
    [
        (64, 18, torch.float32),
        (128, 18, torch.float32),
        (150, 2, torch.float32),  # the first order for which oneMKL's LU is parallel
        (256, 18, torch.float32),
        (256, 2, torch.float64),
        (512, 2, torch.float32),
    ],
)
def test_batches_are_solved_right_with_any_number_of_threads(order: int, count: int, dtype: torch.dtype) -> None:
    rotations, generators = batch_of_rotations(count, order, dtype=dtype)
    moved = stiefel.cayley_exact(generators, rotations)
    skew, identity = generators.double().numpy() / 2, np.eye(order)
    for half, start, end in zip(skew, rotations.double().numpy(), moved.double().numpy(), strict=True):
        expected = scipy.linalg.solve(identity + half, (identity - half) @ start)
        np.testing.assert_allclose(end, expected, atol=PRECISION[dtype], rtol=0.0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("order", [128, 256])
def test_batches_are_retracted_right_with_any_number_of_threads(order: int) -> None:
    rotations = random_rotation(2, order, order, seed=order) + 1e-3 * random_matrix(2, order, order, seed=order)
    expected = np.stack([scipy.linalg.polar(one)[0] for one in rotations.numpy()])
    np.testing.assert_allclose(stiefel.polar_projection(rotations).numpy(), expected, atol=1e-9)
    retracted = stiefel.qr_retraction(rotations)
    triangular = (retracted.mT @ rotations).numpy()
    np.testing.assert_allclose(triangular, np.triu(triangular), atol=1e-12)
    assert (retracted.mT @ retracted - torch.eye(order)).abs().max().item() < 1e-13


@pytest.mark.usefixtures("threads")
def test_a_batch_far_from_orthogonal_is_projected_right_with_any_number_of_threads() -> None:
    matrices = random_matrix(2, 256, 256, seed=0)
    expected = np.stack([scipy.linalg.polar(one)[0] for one in matrices.numpy()])
    np.testing.assert_allclose(stiefel.polar_projection(matrices).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("angle", [1e-3, 0.1, 1.0, 3.0, 3.14159])
@pytest.mark.parametrize("order", [5, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_check_of_a_solve_lets_right_ones_pass(dtype: torch.dtype, order: int, angle: float) -> None:
    rotation = random_rotation(order, order, seed=0, dtype=dtype)
    for name, generator in ({"dense": random_skew(order, order, seed=0)} if order == 5 else spectra(order, 0)).items():
        size = stiefel.angle_step_size(generator.to(dtype), angle=angle)
        moved = stiefel.cayley_exact(size * generator.to(dtype), rotation)
        assert moved.isfinite().all(), name


def broken_solve(error: float, *, member: int = 1) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a solve that adds an error to one entry of one member's solution."""
    solve, calls = torch.linalg.solve_ex, iter(range(100))

    def broken(system: Tensor, target: Tensor, *, left: bool) -> tuple[Tensor, Tensor]:
        solution, info = solve(system, target, left=left)
        if solution.ndim > 2:
            solution[member, 0, 3] += error
        elif next(calls) == member:
            solution[0, 3] += error
        return solution, info

    return broken


@pytest.mark.parametrize("error", [0.1, math.nan, math.inf])
@pytest.mark.parametrize("order", [64, 256])
def test_a_wrong_solution_is_refused(monkeypatch: pytest.MonkeyPatch, order: int, error: float) -> None:
    rotations, generators = batch_of_rotations(3, order, dtype=torch.float32)
    monkeypatch.setattr(torch.linalg, "solve_ex", broken_solve(error))
    with pytest.raises(RuntimeError, match=r"^[^\n]+$") as refusal:
        stiefel.cayley_exact(generators, rotations)
    words = (f"order {order}", "residual", "above 3.5e-04", "solver=fixed_point", "one CPU thread")
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_generator_that_is_not_finite_spoils_its_own_rotation() -> None:
    rotations, generators = batch_of_rotations(3, 70, dtype=torch.float32)
    expected = stiefel.cayley_exact(generators, rotations)
    generators[1, 4, 5] = math.nan
    moved = stiefel.cayley_exact(generators, rotations)
    assert torch.equal(moved[::2], expected[::2])
    assert moved[1].isnan().any()


def test_an_accelerator_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda right, message: messages.append(f"{message}: {right.shape}"))
    rotations = torch.empty(18, 256, 256, device="meta")
    assert stiefel.cayley_exact(rotations, rotations).shape == rotations.shape, "a host that reads fails on meta"
    assert "order 256" in messages[0]
    assert "above 3.5e-04" in messages[0]
    assert messages[0].endswith("torch.Size([])")


@pytest.mark.parametrize("seed", SEEDS)
def test_cayley_agrees_with_the_exponential_to_second_order(seed: int) -> None:
    generator, rotation = random_skew(10, 10, seed=seed), random_rotation(10, 10, seed=seed)
    errors = []
    for step in (1e-2, 1e-3):
        exponential = scipy.linalg.expm(-step * generator.numpy()) @ rotation.numpy()
        errors.append(np.abs(stiefel.cayley_exact(step * generator, rotation).numpy() - exponential).max())
    assert errors[0] < 1e-3
    assert errors[1] < errors[0] / 500


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_fixed_point_error_stays_below_its_bound(iterations: int, seed: int) -> None:
    generator, rotation = random_skew(20, 20, seed=seed), random_rotation(20, 20, seed=seed)
    generator = generator * (0.8 / torch.linalg.matrix_norm(generator, ord=2))
    approximate = stiefel.cayley_fixed_point(generator, rotation, iterations=iterations)
    error = torch.linalg.matrix_norm(approximate - stiefel.cayley_exact(generator, rotation), ord=2).item()
    assert 0.1 * 0.4 ** (iterations + 2) < error <= 2 * 0.4 ** (iterations + 2)


def test_exact_cayley_without_a_generator_moves_no_bit() -> None:
    rotation = random_rotation(2, 30, 30, seed=0, dtype=torch.float32)
    assert torch.equal(stiefel.cayley_exact(torch.zeros_like(rotation), rotation), rotation)
    assert stiefel.cayley_exact(torch.zeros_like(rotation), rotation).is_contiguous()


def spectra(size: int, seed: int) -> dict[str, Tensor]:
    left, right = random_matrix(2, size, 3, seed=seed).unbind()
    basis, values = random_rotation(size, size, seed=seed), torch.linspace(0.1, 0.97, size // 2, dtype=torch.float64)
    values[-1] = 1.0
    blocks = torch.zeros(size, size, dtype=torch.float64)
    even = torch.arange(0, size - 1, 2)
    blocks[even, even + 1] = values
    plane = torch.zeros(size, size, dtype=torch.float64)
    plane[1, size - 1] = 1.0
    walsh = torch.from_numpy(scipy.linalg.hadamard(size)).double()
    named = {
        "dense": random_matrix(size, size, seed=seed),
        "rank 2": torch.outer(left[:, 0], right[:, 0]),
        "rank 6": left @ right.mT,
        "tiny": 1e-25 * random_matrix(size, size, seed=seed),
        "huge": 1e25 * random_matrix(size, size, seed=seed),
        "flat spectrum with a lone top": basis @ blocks @ basis.mT,
        "one coordinate plane": plane,
        "one Walsh plane": torch.outer(walsh[1], walsh[size - 1]),
        "decaying": torch.outer(1.0 / torch.arange(1, size + 1), torch.ones(size)).double() * left[:, :1],
    }
    return {name: matrix - matrix.mT for name, matrix in named.items()}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_spectral_norm_is_within_one_percent_and_closer_where_the_docs_say_so(size: int, seed: int) -> None:
    matrices = {"dense": random_skew(size, size, seed=seed)} if size < 8 else spectra(size, seed)
    batch = torch.stack(list(matrices.values()))
    expected = torch.linalg.matrix_norm(batch, ord=2)
    for dtype in (torch.float32, torch.float64):
        estimate = stiefel.spectral_norm_skew(batch.to(dtype)).double()
        ratios = dict(zip(matrices, (estimate / expected).tolist(), strict=True))
        assert all(0.99 < ratio < 1.0035 for ratio in ratios.values()), ratios
        assert all(abs(ratios.get(name, 1.0) - 1.0) < 2e-3 for name in ("rank 2", "rank 6")), ratios
        assert torch.equal(stiefel.spectral_norm_skew(batch.to(dtype)).double(), estimate)


@pytest.mark.parametrize("size", [64, 256, 576])
def test_spectral_norm_of_dense_random_matrices_is_low_by_half_a_percent_at_most(size: int) -> None:
    generators = torch.stack([random_skew(size, size, seed=seed) for seed in SEEDS]).float()
    ratios = stiefel.spectral_norm_skew(generators) / torch.linalg.matrix_norm(generators, ord=2)
    assert ratios.min() > 0.9945
    assert ratios.max() < 1.0035


def test_spectral_norm_of_zero_is_zero() -> None:
    assert torch.equal(stiefel.spectral_norm_skew(torch.zeros(2, 5, 5)), torch.zeros(2))
    assert torch.equal(stiefel.spectral_norm_skew(torch.zeros(1, 1)), torch.tensor(0.0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("angle", [1e-3, 0.1, 1.0, 3.0])
def test_angle_step_turns_the_fastest_plane_by_the_angle(angle: float, seed: int) -> None:
    generator, rotation = random_skew(24, 24, seed=seed), random_rotation(24, 24, seed=seed)
    size = stiefel.angle_step_size(generator, angle=angle)
    moved = stiefel.cayley_exact(size * generator, rotation)
    assert angles_of(moved @ rotation.mT).max() == pytest.approx(angle, rel=0.01)
    measured = stiefel.largest_rotation_angle(rotation, moved).item()
    assert measured == pytest.approx(angles_of(moved @ rotation.mT).max(), rel=1e-9)


def test_angle_step_of_no_gradient_is_zero() -> None:
    assert torch.equal(stiefel.angle_step_size(torch.zeros(2, 4, 4), angle=3.0), torch.zeros(2))


def test_contraction_step_is_capped_only_by_a_large_generator() -> None:
    generator = torch.zeros(2, 3, 3)
    generator[1] = torch.tensor([[0.0, 3.0, -4.0], [-3.0, 0.0, 1.0], [4.0, -1.0, 0.0]])
    sizes = stiefel.contraction_step_size(generator, lr=0.25, contraction=0.5, epsilon=1e-8)
    torch.testing.assert_close(sizes, torch.tensor([0.25, 1.0 / 7.0]))


@pytest.mark.parametrize("seed", SEEDS)
def test_orthogonality_error_is_computed_in_float64(seed: int) -> None:
    rotation = random_rotation(2, 9, 9, seed=seed, dtype=torch.float32) + 1e-3 * random_matrix(9, 9, seed=seed).float()
    rows, columns = stiefel.orthogonality_error(rotation)
    dense = rotation.numpy().astype(np.float64)
    expected_rows = [np.abs(one @ one.T - np.eye(9)).max() for one in dense]
    expected_columns = [np.abs(one.T @ one - np.eye(9)).max() for one in dense]
    assert rows.dtype == columns.dtype == torch.float64
    np.testing.assert_allclose(rows.numpy(), expected_rows, rtol=1e-9)
    np.testing.assert_allclose(columns.numpy(), expected_columns, rtol=1e-9)


@pytest.mark.parametrize("order", [191, 192, 193, 576])
def test_orthogonality_error_of_a_wide_rotation_is_found_anywhere(order: int) -> None:
    """Of a symmetric product half is computed, in parts: an error beside the diagonal, and in the last corner of it."""
    for row, column in ((0, order - 1), (order - 1, 0), (order // 2, 3), (order - 1, order - 1)):
        matrix = torch.eye(order)
        matrix[row, column] += 1e-3
        dense = matrix.numpy().astype(np.float64)
        for error, product in zip(stiefel.orthogonality_error(matrix), (dense @ dense.T, dense.T @ dense), strict=True):
            assert error.item() == pytest.approx(np.abs(product - np.eye(order)).max(), rel=1e-9)
    matrix[7, 5] = torch.nan
    assert all(error.isnan() for error in stiefel.orthogonality_error(matrix))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [1e-6, 1e-2, 1.0])
def test_polar_projection_is_the_polar_factor(noise: float, seed: int) -> None:
    matrix = random_rotation(2, 12, 12, seed=seed) + noise * random_matrix(2, 12, 12, seed=seed)
    projected = stiefel.polar_projection(matrix)
    expected = np.stack([scipy.linalg.polar(one)[0] for one in matrix.numpy()])
    np.testing.assert_allclose(projected.numpy(), expected, atol=1e-9)


def test_polar_projection_does_not_converge_to_another_orthogonal_matrix() -> None:
    torch.testing.assert_close(stiefel.polar_projection(1.9 * torch.eye(4)), torch.eye(4))


@pytest.mark.parametrize("retract", [stiefel.polar_projection, stiefel.qr_retraction])
@pytest.mark.parametrize("size", [64, 576])
def test_retractions_restore_float32_rotations(retract: Callable[[Tensor], Tensor], size: int) -> None:
    drifted = (
        random_rotation(size, size, seed=0, dtype=torch.float32) + 1e-5 * random_matrix(size, size, seed=0).float()
    )
    retracted = retract(drifted)
    assert retracted.is_contiguous()
    assert retracted.dtype == torch.float32
    assert max(error.item() for error in stiefel.orthogonality_error(drifted)) > 1e-5
    assert max(error.item() for error in stiefel.orthogonality_error(retracted)) < 2e-7
    assert (retracted - drifted).abs().max().item() < 1e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_qr_retraction_stays_near_whatever_the_signs(seed: int) -> None:
    rotation = random_rotation(4, 8, 8, seed=seed)
    torch.testing.assert_close(stiefel.qr_retraction(rotation), rotation, atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_functions_treat_a_batch_as_its_members(seed: int) -> None:
    rotation, gradient = random_rotation(2, 3, 7, 7, seed=seed), random_matrix(2, 3, 7, 7, seed=seed)
    generator = stiefel.skew_generator(rotation, gradient)
    pairs: dict[Callable[..., Tensor], tuple[Tensor, ...]] = {
        stiefel.skew_generator: (rotation, gradient),
        stiefel.cayley_exact: (generator, rotation),
        stiefel.spectral_norm_skew: (generator,),
        stiefel.qr_retraction: (rotation,),
        stiefel.polar_projection: (rotation,),
        stiefel.largest_rotation_angle: (rotation, rotation.flip(0)),
    }
    for function, arguments in pairs.items():
        member = function(*(argument[1, 2] for argument in arguments))
        torch.testing.assert_close(function(*arguments)[1, 2], member, atol=1e-10, rtol=1e-10)
