"""Maths of square orthogonal matrices: gradients, Cayley steps, retractions and distances, all batched and pure."""

import math

import torch
from torch import Tensor

from rotexp.orthogonal.elimination import powers_needed, solve_near_identity
from rotexp.orthogonal.linear_systems import probe_vector, solve_from_right

SQUARINGS = 9
LEAST_ESTIMATE = 0.98
"""What `spectral_norm_skew` returns at least of the norm: 0.99 of it in every case measured, and some to spare."""
POLAR_ITERATIONS = 8
POLAR_TOLERANCE = 1e-10
ERROR_ROWS = 192
"""Rows of a product of which half is computed: fewer spare more of it, and make smaller products."""


def skew_generator(rotation: Tensor, gradient: Tensor) -> Tensor:
    """Return the skew matrix whose flow descends: A = G Rᵀ − R Gᵀ, with R' = −A R.

    A R = G − R Gᵀ R is the Riemannian gradient under the canonical metric ½ tr(XᵀY) of O(n), twice the one under the
    Euclidean metric tr(XᵀY); the loss changes at the rate −½‖A‖²_F along R' = −A R. Exactly skew in floating point.

    Args:
        rotation: (..., n, n), orthogonal.
        gradient: (..., n, n), the loss's Euclidean gradient at `rotation`, same dtype.

    Returns:
        (..., n, n), same dtype.

    Source: Wen and Yin, "A feasible method for optimization with orthogonality constraints", 2013, Lemma 1; twice the
    (negated) W of Li, Li and Todorovic, ICLR 2020, Algorithm 1, in the square case.
    """
    product = gradient @ rotation.mT
    return product - product.mT


def cayley_exact(generator: Tensor, rotation: Tensor, *, length: float = math.inf) -> Tensor:
    """Move a rotation along its generator: (I + ½A)⁻¹ (I − ½A) R, to rounding.

    The sign is that of descent: to first order the result is R − A R, and it turns every eigenplane of A with
    eigenvalues ±iσ by 2 atan(σ/2). I + ½A is never singular. Solved as 2 (I + ½A)⁻¹ R − R, which saves a product. A
    generator that is not finite spoils its own rotation.

    Where ½A is short enough, products alone solve it, at any number of threads: their series leave out less than one
    epsilon of the dtype, see `elimination.truncation_error`. Elsewhere a factorization does.

    Args:
        generator: (..., n, n), skew, already multiplied by the step size.
        rotation: (..., n, n), orthogonal, same dtype.
        length: a bound on ‖½A‖₂, where one is known.

    Returns:
        (..., n, n), same dtype, contiguous.

    Raises:
        RuntimeError: the solve went wrong, see `linear_systems.check_residual`.

    Source: Li, Li and Todorovic, ICLR 2020, the Cayley transform Y(α) with αW = −A.
    """
    powers = powers_needed(length, generator.dtype)
    if powers is None:
        return _cayley_by_factorization(generator, rotation)
    return torch.lerp(rotation, solve_near_identity(0.5 * generator, rotation, powers=powers), 2.0)


def _cayley_by_factorization(generator: Tensor, rotation: Tensor) -> Tensor:
    transposed_system = -0.5 * generator
    transposed_system.diagonal(dim1=-2, dim2=-1).add_(1.0)
    transposed_solution = solve_from_right(transposed_system, rotation.mT)
    moved = torch.lerp(rotation, transposed_solution.mT, 2.0)
    # Elimination rounds the small squares next to the unit diagonal away, always in the same direction: without this,
    # row norms drift ten times faster than the angles between rows.
    return moved * (_row_norms(rotation) / _row_norms(moved))


def _row_norms(matrix: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=-1, keepdim=True)
    return norms


def cayley_fixed_point(generator: Tensor, rotation: Tensor, *, iterations: int) -> Tensor:
    """Approximate `cayley_exact` by products only: Y ← R − ½A (R + Y), from Y = R − A R.

    Converges when ‖A‖₂ < 2; the spectral error is at most 2 (‖A‖₂/2)^(iterations + 2).

    Args:
        generator: (..., n, n), skew, already multiplied by the step size.
        rotation: (..., n, n), orthogonal, same dtype.
        iterations: how often Y is replaced, at least 1.

    Returns:
        (..., n, n), same dtype.

    Source: Li, Li and Todorovic, ICLR 2020, Algorithm 1, the fixed-point loop, with αW = −A.
    """
    half = 0.5 * generator
    moved = rotation - generator @ rotation
    for _ in range(iterations):
        moved = rotation - half @ (rotation + moved)
    return moved


def spectral_norm_skew(generator: Tensor, *, iterations: int = 32) -> Tensor:
    """Estimate the largest singular value of skew matrices by skew Lanczos, without the host waiting for the device.

    Deterministic: the start vector is fixed, with no entry near zero. High by up to 0.35 %, what the power norm adds
    where few singular values matter (0.15 % at rank 2). Low by up to 0.55 % on a dense random matrix at 32 iterations,
    measured up to order 1024, and by up to 1 % on the other spectra tested, since Lanczos has not converged then. A
    step sized by the estimate overshoots its angle by at most the fraction the estimate is low.

    Args:
        generator: (..., n, n), skew.
        iterations: matrix-vector products, at least 1.

    Returns:
        (...), same dtype; 0 for a zero matrix.

    Source: Golub and Van Loan, "Matrix Computations", 10.1 (Lanczos); for a skew matrix the diagonal vanishes.
    """
    order = generator.shape[-1]
    matrices = generator.reshape(-1, order, order)
    scale = matrices.amax(dim=(-2, -1), keepdim=True)  # the largest magnitude, since its negative is there too
    scaled = matrices * scale.clamp_min(torch.finfo(scale.dtype).tiny).reciprocal()
    couplings = _lanczos_couplings(scaled, iterations=min(iterations, order))
    return (_tridiagonal_norm(couplings) * scale[:, 0, 0]).view(generator.shape[:-2])


def _lanczos_couplings(generator: Tensor, *, iterations: int) -> Tensor:
    """Return β (batch, iterations) of v_j A = β_j v_{j+1} − β_{j−1} v_{j−1}, for A (batch, n, n) of entries at most 1.

    By rows, which a batch of matrices takes ten times faster than columns on a CPU.
    """
    tiny = torch.finfo(generator.dtype).tiny
    current = probe_vector(generator).expand(len(generator), 1, -1)
    previous, coupling = torch.zeros_like(current), torch.zeros_like(generator[:, :1, :1])
    couplings = []
    for _ in range(iterations):
        following = torch.bmm(current, generator).addcmul_(coupling, previous)
        coupling = torch.linalg.vector_norm(following, dim=-1, keepdim=True)
        previous, current = current, following / coupling.clamp_min(tiny)
        couplings.append(coupling)
    return torch.cat(couplings, dim=-1)[:, 0]


def _tridiagonal_norm(couplings: Tensor) -> Tensor:
    """Return ‖T‖₂ (...) of the tridiagonal T with zero diagonal, as ‖Γ^p‖_F^(1/2p) for p = 2^SQUARINGS.

    T couples odd places with even ones only, by a bidiagonal C; Γ = CᵀC is tridiagonal, and of half the order.
    """
    paired = torch.nn.functional.pad(couplings, (0, couplings.shape[-1] % 2))
    first, second = paired[..., ::2], paired[..., 1::2]
    beside = torch.diag_embed(second[..., :-1] * first[..., 1:], offset=1)
    power = torch.diag_embed(first.square() + second.square()) + beside + beside.mT
    logarithm = torch.zeros_like(couplings[..., 0])
    for squaring in range(SQUARINGS + 1):
        norm = torch.linalg.matrix_norm(power, keepdim=True).clamp_min(torch.finfo(power.dtype).tiny)
        logarithm = logarithm + norm[..., 0, 0].log() / 2**squaring
        power = power / norm
        power = power @ power
    return (0.5 * logarithm).exp()


def angle_step_size(generator: Tensor, *, angle: float) -> Tensor:
    """Return α so that the Cayley step of αA turns its fastest plane by the given angle: 2 tan(angle/2)/‖A‖₂.

    Args:
        generator: (..., n, n), skew.
        angle: radians, in [0, π).

    Returns:
        (...), same dtype; 0 for a zero matrix.
    """
    norm = spectral_norm_skew(generator)
    limits = torch.finfo(norm.dtype)
    size = (2.0 * math.tan(0.5 * angle) / norm).clamp(max=limits.max)
    return torch.where(norm > limits.tiny, size, 0.0)


def angle_step_length(angle: float) -> float:
    """Return a bound on ‖½αA‖₂ of the α that `angle_step_size` chooses, by the accuracy of its estimate of ‖A‖₂."""
    return math.tan(0.5 * angle) / LEAST_ESTIMATE


def contraction_step_size(generator: Tensor, *, lr: float, contraction: float, epsilon: float) -> Tensor:
    """Return min(lr, 2q/(‖W‖ + ε)), below which the Cayley fixed point contracts by the factor q or better.

    Args:
        generator: (..., n, n), skew: the paper's W.
        lr: the step size where the bound does not bind.
        contraction: q, in (0, 1).
        epsilon: ε, which keeps the bound finite.

    Returns:
        (...), same dtype.

    Source: Li, Li and Todorovic, ICLR 2020, Algorithm 1. The norm is left open there; this is the largest
    absolute row sum, never below ‖W‖₂.
    """
    norm = generator.abs().sum(dim=-1).amax(dim=-1)
    return (norm + epsilon).reciprocal().mul(2.0 * contraction).clamp(max=lr)


def orthogonality_error(rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Return max|R Rᵀ − I| and max|Rᵀ R − I| of each matrix; after training the first is two to three times the second.

    Args:
        rotation: (..., n, n), any real dtype.

    Returns:
        Two tensors (...), float64, computed in float64.
    """
    precise = rotation.double()
    return _identity_error(precise), _identity_error(precise.mT)


def _identity_error(vectors: Tensor) -> Tensor:
    """Return max|V Vᵀ − I| (...) of vectors (..., n, n), which is symmetric: what is left of its diagonal will do."""
    errors = []
    for start in range(0, vectors.shape[-1], ERROR_ROWS):
        stop = start + ERROR_ROWS
        rows = vectors[..., start:stop, :] @ vectors[..., :stop, :].mT
        rows.diagonal(offset=start, dim1=-2, dim2=-1).sub_(1.0)
        errors.append(rows.abs_().amax(dim=(-2, -1)))
    return torch.stack(errors).amax(0)


def polar_projection(rotation: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to each given one: U Vᵀ of its singular value decomposition.

    Newton–Schulz in float64, which near orthogonality needs two or three rounds of products; the decomposition itself
    where the input is too far away for that. The host reads the distance, so this belongs after a step, not in one.

    Args:
        rotation: (..., n, n), nonsingular.

    Returns:
        (..., n, n), same dtype, contiguous.

    Source: Higham, "Functions of Matrices", 2008, chapter 8.
    """
    projected = rotation.double()
    identity = torch.eye(projected.shape[-1], dtype=projected.dtype, device=projected.device)
    for _ in range(POLAR_ITERATIONS):
        residual = projected.mT @ projected - identity
        distance = residual.abs().sum(dim=-1).max().item()
        if distance < POLAR_TOLERANCE:
            return projected.to(rotation.dtype).contiguous()
        if not distance < 2.0:
            break
        projected = projected - 0.5 * projected @ residual
    left, _, right = torch.linalg.svd(rotation.double())
    factor: Tensor = left @ right
    return factor.to(rotation.dtype).contiguous()


def qr_retraction(rotation: Tensor) -> Tensor:
    """Return the Q factor with the signs that keep it next to the given matrix (a positive diagonal of the R factor).

    In float64, so that differences in summation order nearly always vanish when rounding back to float32; from order
    1024 on a few last bits remain, so replicas need equal threads all the same.

    Args:
        rotation: (..., n, n), nonsingular.

    Returns:
        (..., n, n), same dtype, contiguous.
    """
    orthogonal, triangular = torch.linalg.qr(rotation.double())
    diagonal = triangular.diagonal(dim1=-2, dim2=-1)
    signs = torch.ones_like(diagonal).copysign(diagonal)
    near: Tensor = orthogonal * signs.unsqueeze(-2)
    return near.to(rotation.dtype).contiguous()


def largest_rotation_angle(first: Tensor, second: Tensor) -> Tensor:
    """Return the largest angle by which the turn from one rotation to another moves any vector.

    Args:
        first: (..., n, n), orthogonal.
        second: (..., n, n), orthogonal.

    Returns:
        (...), float64, radians in [0, π]: 2 asin(‖first − second‖₂ / 2).
    """
    distance: Tensor = torch.linalg.matrix_norm(first.double() - second.double(), ord=2)
    return torch.asin((0.5 * distance).clamp(max=1.0)) * 2.0
