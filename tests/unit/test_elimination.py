"""Checks Cayley steps by products alone against dense float64 solves, and the bound on what their series leave out."""

import math

import numpy as np
import pytest
import scipy.linalg  # type: ignore[import-untyped]
import torch
from torch import Tensor

from rotexp.optim.options import CayleySGDOptions
from rotexp.orthogonal import elimination, stiefel
from rotexp.orthogonal.elimination import MOST_POWERS, powers_needed, solve_near_identity, truncation_error

SEEDS = range(3)
LARGEST = {torch.float32: 0.95, torch.float64: 0.48}
"""The angles up to which products step, by the angle rule; the options' documentation says the first."""
EXACT = {torch.float32: 1e-6, torch.float64: 1e-14}


def random_rotation(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draws = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(draws)[0].contiguous().to(dtype)


def random_skew(*shape: int, seed: int) -> Tensor:
    draws = torch.randn(*shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)
    return draws - draws.mT


def spectra(order: int, seed: int) -> dict[str, Tensor]:
    """Return skew matrices of an even order and unit norm: dense, all planes alike, one plane in or across pivots."""
    within, across = torch.zeros(2, order, order, dtype=torch.float64)
    within[0, 1], across[0, -1] = 1.0, 1.0
    planes = torch.block_diag(*[torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)] * (order // 2))
    basis = random_rotation(order, order, seed=seed)
    found = {"dense": random_skew(order, order, seed=seed), "flat": basis @ (planes - planes.mT) @ basis.mT}
    found |= {"within": within - within.mT, "across": across - across.mT}
    return {name: matrix / torch.linalg.matrix_norm(matrix, ord=2) for name, matrix in found.items()}


def dense_cayley(half: Tensor, rotation: Tensor) -> np.ndarray:
    skew, identity = half.double().numpy(), np.eye(half.shape[-1])
    moved: np.ndarray = scipy.linalg.solve(identity + skew, (identity - skew) @ rotation.double().numpy())
    return moved


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", [2, 34, 64, 130])
@pytest.mark.parametrize("length", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("powers", [1, 2, 5])
def test_what_the_series_leave_out_stays_below_its_bound(powers: int, length: float, order: int, seed: int) -> None:
    rotation, bound = random_rotation(order, order, seed=seed), truncation_error(length, powers=powers)
    for name, unit in spectra(order, seed).items():
        moved = torch.lerp(rotation, solve_unchecked(length * unit, rotation, powers=powers), 2.0)
        error = np.linalg.norm(moved.numpy() - dense_cayley(length * unit, rotation), 2)
        assert error <= bound + 1e-14, name
        assert name != "flat" or order > 2 or error > 0.3 * bound, "a bound that is far too wide chooses too much work"


def solve_unchecked(skew: Tensor, target: Tensor, *, powers: int) -> Tensor:
    """Solve with a series that may be too short to pass the check."""
    rest, solution = skew.clone()[None], target.clone()[None]
    elimination._eliminate(rest, solution, powers=powers)
    return solution[0]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("order", "count"),
    [(1, 2), (3, 2), (64, 30), (128, 5), (256, 4), (576, 1), pytest.param(2048, 1, marks=pytest.mark.slow)],
)
def test_products_step_exactly_at_the_defaults_with_any_number_of_threads(order: int, count: int) -> None:
    rotations = random_rotation(count, order, order, seed=0, dtype=torch.float32)
    generators = stiefel.skew_generator(rotations, random_skew(count, order, order, seed=1).float() @ rotations)
    steps = stiefel.angle_step_size(generators, angle=CayleySGDOptions.lr)[:, None, None] * generators
    length = stiefel.angle_step_length(CayleySGDOptions.lr)
    assert powers_needed(length, torch.float32) == 2
    moved = stiefel.cayley_exact(steps, rotations, length=length)
    for index in {0, count - 1}:
        expected = dense_cayley(steps[index] / 2, rotations[index])
        assert np.linalg.norm(moved[index].numpy() - expected, 2) < 1e-6
        np.testing.assert_allclose(moved[index].numpy(), expected, atol=2e-7, rtol=0.0)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("share", [1e-4, 0.07, 0.3, 0.6, 1.0])
def test_products_are_exact_at_every_rate_that_chooses_them(share: float, dtype: torch.dtype) -> None:
    angle, order = share * LARGEST[dtype], 130
    length, rotation = stiefel.angle_step_length(angle), random_rotation(order, order, seed=0, dtype=dtype)
    powers = powers_needed(length, dtype)
    assert powers is not None
    for name, unit in spectra(order, 0).items():
        half = (length * unit).to(dtype)
        moved = torch.lerp(rotation, solve_near_identity(half, rotation, powers=powers), 2.0)
        error = np.linalg.norm(moved.double().numpy() - dense_cayley(half, rotation), 2)
        assert error < EXACT[dtype], name
        assert max(drift.item() for drift in stiefel.orthogonality_error(moved)) < EXACT[dtype], name


def test_powers_are_the_fewest_that_leave_out_less_than_rounding() -> None:
    for dtype in LARGEST:
        for length in np.linspace(1e-3, 0.99, 60):
            powers, allowed = powers_needed(length, dtype), torch.finfo(dtype).eps
            assert (powers is None) == (truncation_error(length, powers=MOST_POWERS) > allowed)
            assert powers is None or truncation_error(length, powers=powers) <= allowed
            assert powers in (None, 1) or truncation_error(length, powers=powers - 1) > allowed
    assert powers_needed(0.5, torch.float32) == 11, "the paper rule's length"
    assert all(powers_needed(length, torch.float32) is None for length in (1.0, math.inf, math.nan))


@pytest.mark.parametrize("angle", [0.1, 3.0])
def test_the_length_of_an_angle_step_is_never_above_the_one_stated(angle: float) -> None:
    for name, unit in spectra(64, 0).items():
        half = 0.5 * stiefel.angle_step_size(unit.float(), angle=angle) * unit.float()
        length = torch.linalg.matrix_norm(half.double(), ord=2).item()
        assert 0.95 * stiefel.angle_step_length(angle) < length < stiefel.angle_step_length(angle), name


@pytest.mark.parametrize("order", [64, 256])
def test_a_generator_longer_than_stated_is_refused(order: int) -> None:
    skew = spectra(order, 0)["flat"].float().repeat(3, 1, 1) * torch.tensor([0.05, 0.9, 0.05])[:, None, None]
    with pytest.raises(RuntimeError, match=r"^[^\n]+$") as refusal:
        solve_near_identity(skew, random_rotation(3, order, order, seed=0, dtype=torch.float32), powers=2)
    words = (f"order {order}", "residual", "above 3.5e-04", "lower lr")
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_rotation(spoil: float) -> None:
    rotations = random_rotation(3, 70, 70, seed=0, dtype=torch.float32)
    skew = 0.001 * random_skew(3, 70, 70, seed=0).float()
    expected = solve_near_identity(skew, rotations, powers=2)
    skew[1, 4, 5] = spoil
    moved = solve_near_identity(skew, rotations, powers=2)
    assert torch.equal(moved[::2], expected[::2])
    assert moved[1].isnan().any()


def test_arguments_stay_as_they_are_and_batches_have_any_shape() -> None:
    rotations, skew = random_rotation(2, 3, 40, 40, seed=0), 0.001 * random_skew(2, 3, 40, 40, seed=0)
    before = rotations.clone(), skew.clone()
    moved = solve_near_identity(skew, rotations.mT, powers=2)
    assert torch.equal(rotations, before[0])
    assert torch.equal(skew, before[1])
    assert moved.is_contiguous()
    torch.testing.assert_close(moved[1, 2], solve_near_identity(skew[1, 2], rotations.mT[1, 2], powers=2))


def test_no_bit_moves_without_a_generator() -> None:
    rotation = random_rotation(2, 70, 70, seed=0, dtype=torch.float32)
    assert torch.equal(stiefel.cayley_exact(torch.zeros_like(rotation), rotation, length=0.05), rotation)


def test_an_accelerator_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda right, message: messages.append(f"{message}: {right.shape}"))
    rotations = torch.empty(18, 256, 256, device="meta")
    moved = stiefel.cayley_exact(rotations, rotations, length=0.05)
    assert moved.shape == rotations.shape, "a host that reads fails on meta"
    assert "order 256" in messages[0]
    assert messages[0].endswith("torch.Size([])")
