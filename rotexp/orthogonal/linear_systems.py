"""Linear systems of Cayley steps: solved so that a batch is right on every device, and every solution is checked."""

import torch
from torch import Tensor

LARGEST_BATCHED_ORDER = 64
# The cyclic order of a quadratic sequence modulo a prime looks random and is the same on every device.
PROBE_PRIME = 10007
PROBE_MULTIPLIER = 3719
REMEDY = "set solver=fixed_point, which needs no solve, or use one CPU thread"


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
    probe = probe_vector(system)
    image = probe @ system.mT
    check_residual(image @ solution.mT, probe @ target.mT, image, order=order, remedy=REMEDY)
    return solution


def _solved(system: Tensor, target: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.solve_ex(system, target, left=False)[0]
    return solution


def check_residual(image: Tensor, expected: Tensor, system_image: Tensor, *, order: int, remedy: str) -> None:
    """Compare the rows (v S) X and v T of solutions of S X = T: right ones differ by rounding, wrong ones by far more.

    By rows, which a batch of matrices takes ten times faster than columns on a CPU. An accelerator is not waited for.

    Args:
        image: (v S) X (..., 1, n).
        expected: v T (..., 1, n).
        system_image: v S (..., 1, n), for its size.
        order: of the rotations, and `remedy` what to do, for the message.

    Raises:
        RuntimeError: a solution is wrong: at once on the CPU; on an accelerator as its own asynchronous error. A row
            that is not finite, of a system or a target that is not, is not compared.
    """
    size = _norms(system_image) + _norms(expected)
    residual = _norms(image - expected) / size
    bound = torch.finfo(image.dtype).eps ** 0.5  # half the digits
    wrong = size.isfinite() & ~(residual <= bound)
    failure = f"a solve for rotations of order {order} is wrong"
    if not image.is_cpu:
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
