"""Linear systems of Cayley steps: solved so that a batch is right on every device, and every solution is checked."""

import torch
from torch import Tensor

LARGEST_BATCHED_ORDER = 64
# The cyclic order of a quadratic sequence modulo a prime looks random and is the same on every device.
PROBE_PRIME = 10007
PROBE_MULTIPLIER = 3719


def solve_from_right(system: Tensor, target: Tensor) -> Tensor:
    """Solve X S = T, and check the residual of every X on one vector, without the host waiting for an accelerator.

    On the CPU, batches of an order above 64 are solved one by one. torch's batched LU (which `solve`, `inv` and `det`
    use) lets its threads enter LAPACK side by side, and oneMKL's LU, parallel itself from an order of 150 on, then
    gives wrong pivots or never returns (torch 2.13, two and more threads; pytorch #142815). From an order of 96 on,
    one by one is as fast as a batch.

    Args:
        system: S (..., n, n), float32 or float64, the identity plus a skew matrix.
        target: T (..., n, n), same dtype.

    Returns:
        X (..., n, n), same dtype. A system or target that is not finite spoils its own solution only, unchecked.

    Raises:
        RuntimeError: a solution is wrong: at once on the CPU; on an accelerator as its own asynchronous error.
    """
    order = system.shape[-1]
    if system.is_cpu and system.ndim > 2 and order > LARGEST_BATCHED_ORDER:
        pairs = zip(system.flatten(0, -3), target.flatten(0, -3), strict=True)
        solution = torch.stack([_solved(one, other) for one, other in pairs]).view_as(target)
    else:
        solution = _solved(system, target)
    _check(solution, system, target)
    return solution


def _solved(system: Tensor, target: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.solve_ex(system, target, left=False)[0]
    return solution


def _check(solution: Tensor, system: Tensor, target: Tensor) -> None:
    """Compare X (S v) with T v for a fixed vector v: a right solution differs by rounding, a wrong one by far more.

    By rows, which a batch of matrices takes ten times faster than columns on a CPU.
    """
    probe = probe_vector(system)
    image, expected = probe @ system.mT, probe @ target.mT
    size = _norms(image) + _norms(expected)
    residual = _norms(image @ solution.mT - expected) / size
    bound = torch.finfo(system.dtype).eps ** 0.5  # half the digits
    wrong = size.isfinite() & ~(residual <= bound)
    failure = f"a solve for rotations of order {system.shape[-1]} is wrong"
    remedy = "set solver=fixed_point, which needs no solve, or use one CPU thread"
    if not system.is_cpu:
        torch._assert_async(~wrong.any(), f"{failure}: its residual is above {bound:.1e}; {remedy}")
    elif wrong.any():
        largest = residual[wrong].max().item()
        raise RuntimeError(f"{failure}: its residual is {largest:.1e}, above {bound:.1e}; {remedy}")


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=(-2, -1))
    return norms


def probe_vector(matrix: Tensor) -> Tensor:
    """Return a unit row (1, n) that looks random, with entries of one magnitude so that no axis is missed.

    Args:
        matrix: (..., n, n), whose order, dtype and device it takes.
    """
    index = torch.arange(1, matrix.shape[-1] + 1, device=matrix.device)
    centered = (index * index * PROBE_MULTIPLIER % PROBE_PRIME).to(matrix.dtype) / PROBE_PRIME - 0.5
    vector = centered.sign() + centered
    length: Tensor = torch.linalg.vector_norm(vector)
    return (vector / length).unsqueeze(0)
