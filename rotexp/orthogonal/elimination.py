"""Systems (I + B) X = T of a short skew B by products alone: block elimination, its pivots inverted by series."""

import math

import torch
from torch import Tensor

from rotexp.orthogonal.linear_systems import check_residual, probe_vector

MOST_POWERS = 12
"""Powers of B² up to which products are chosen: enough for ‖B‖₂ = ½, where they add 3 n³ at order 64, 0.4 n³ at 576."""
WIDTH_MULTIPLE = 16
WIDTH_OVER_ROOT = 4.0


def powers_needed(length: float, dtype: torch.dtype) -> int | None:
    """Return the powers of B² that `solve_near_identity` needs to be exact to rounding, or None: too many.

    Args:
        length: a bound on ‖B‖₂.
        dtype: of B; the rounding is its epsilon.
    """
    if not length < 1.0:
        return None
    allowed = torch.finfo(dtype).eps
    powers = range(1, MOST_POWERS + 1)
    return next((count for count in powers if truncation_error(length, powers=count) <= allowed), None)


def truncation_error(length: float, *, powers: int) -> float:
    """Return a bound on the spectral error of (I + B)⁻¹ (I − B) = 2 (I + B)⁻¹ − I by `solve_near_identity`.

    It is 2 (1 + b) b^m to the leading order, m = 2 powers + 3. A pivot C = I + E is inverted as (I − (−E)^m) C⁻¹, which
    is the inverse of another pivot C̃, so the solution is that of a system with C̃ for C, and ‖C̃ − C‖ is (1 + b) b^m;
    (I + B)⁻¹ does not lengthen it. That ‖E‖ ≤ b for every pivot: E y₂ is the lower part of B y for the y whose upper
    part the elimination fixes by (B y)₁ = −y₁, so ‖E y₂‖² = ‖B y‖² − ‖y₁‖² ≤ b² ‖y₂‖² + (b² − 1) ‖y₁‖².

    Args:
        length: b, at most 1.
        powers: at least 1.
    """
    return 2.0 * (1.0 + length) * length ** (2 * powers + 3)


def solve_near_identity(skew: Tensor, target: Tensor, *, powers: int) -> Tensor:
    """Solve (I + B) X = T for a skew B with ‖B‖₂ < 1, without pivoting, factorizations or the host's waiting.

    Elimination by blocks, on what is left of each pivot when the identity is taken away, so that no small square is
    rounded away next to it. Products run two to five times faster than LAPACK's LU for as many solutions (orders 64 to
    2048, CPU), in batches too, and right with any number of threads. It demands n³/3 + n³ multiplications, and a little
    for pivots.

    Args:
        skew: B (..., n, n), float32 or float64.
        target: T (..., n, n), same dtype.
        powers: of B² in the inverses of pivots, see `powers_needed`.

    Returns:
        X (..., n, n), same dtype, contiguous. What is not finite spoils its own solution only, unchecked.

    Raises:
        RuntimeError: a solution is wrong, as where B is longer than was said: see `linear_systems.check_residual`.

    Source: Golub and Van Loan, "Matrix Computations", 3.2.10 (block LU) and 4.1.3 (no pivoting for a positive definite
    symmetric part).
    """
    probe = probe_vector(skew).flip(-1)  # not the vector that estimated the norm
    image, expected = probe + probe @ skew, probe @ target
    rest, solution = (matrix.clone(memory_format=torch.contiguous_format) for matrix in (skew, target))
    order = skew.shape[-1]
    _eliminate(rest.view(-1, order, order), solution.view(-1, order, order), powers=powers)
    remedy = "its generator is longer than was estimated; set a lower lr, and report it"
    check_residual(image @ solution, expected, image, order=order, remedy=remedy)
    return solution


def _eliminate(rest: Tensor, solution: Tensor, *, powers: int) -> None:
    """Turn `solution` (batch, n, n), which is T, into X; `rest`, which is B, is overwritten by what is left of it."""
    order = rest.shape[-1]
    width = block_width(order)
    starts, uppers = range(0, order, width), []
    for start in starts:
        block, below = slice(start, start + width), slice(start + width, order)
        inverse = _inverse_less_identity(rest[:, block, block], powers=powers)
        upper = torch.baddbmm(rest[:, block, below], inverse, rest[:, block, below])
        solution[:, block] = torch.baddbmm(solution[:, block], inverse, solution[:, block])
        solution[:, below].baddbmm_(rest[:, below, block], solution[:, block], alpha=-1.0)
        rest[:, below, below].baddbmm_(rest[:, below, block], upper, alpha=-1.0)
        uppers.append(upper)
    for start, upper in zip(reversed(starts), reversed(uppers), strict=True):
        solution[:, start : start + width].baddbmm_(upper, solution[:, start + width :], alpha=-1.0)


def block_width(order: int) -> int:
    """Return the order of a pivot: pivots are few enough for few products, and small enough for their inverses."""
    return WIDTH_MULTIPLE * math.ceil(WIDTH_OVER_ROOT * math.sqrt(order) / WIDTH_MULTIPLE)


def _inverse_less_identity(perturbation: Tensor, *, powers: int) -> Tensor:
    """Return (I + E)⁻¹ − I as (E² − E)(I + E² + E⁴ + …), to so many powers of E² after the identity."""
    square = perturbation @ perturbation
    powers_sum = square
    for _ in range(powers - 1):
        powers_sum = torch.baddbmm(square, square, powers_sum)
    difference = square - perturbation
    return torch.baddbmm(difference, difference, powers_sum)
