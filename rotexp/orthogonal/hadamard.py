"""Hadamard and random orthogonal matrices of the orders that models use, and the fast Hadamard transform."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache, reduce
from itertools import count

import torch
from torch import Tensor

from rotexp.orthogonal.galois import divisors
from rotexp.orthogonal.goethals_seidel import goethals_seidel_matrix, has_goethals_seidel
from rotexp.orthogonal.paley import (
    conference_matrix,
    first_paley_matrix,
    is_first_paley,
    is_second_paley,
    is_sylvester,
    is_symmetric_conference,
    second_paley_matrix,
    sylvester_matrix,
)
from rotexp.orthogonal.recursive import agayan_sarukhanyan, miyamoto

# What one more pass over the activations costs, in multiply-adds per element. Measured in float32 on one CPU core for
# orders 1536 to 65536: two passes of 64 and 128 cost what three passes of 16, 16 and 32 cost.
_PASS_COST = 128


def hadamard(order: int) -> Tensor:
    """Construct a Hadamard matrix as the Kronecker product of the matrices of its factors.

    Args:
        order: 1, 2 or a multiple of 4 for which `is_constructible` holds.

    Returns:
        matrix: (order, order) int8 on the CPU, entries 1 and -1, with `matrix @ matrix.T == order * identity` exactly
            (in a type that holds `order`). It belongs to the caller.

    Raises:
        ValueError: if the order cannot be constructed.
    """
    return reduce(torch.kron, [_direct_matrix(factor) for factor in hadamard_factors(order)])


def hadamard_factors(order: int) -> tuple[int, ...]:
    """Split an order into the orders of the Kronecker factors that make the transform cheapest.

    Args:
        order: 1, 2 or a multiple of 4 for which `is_constructible` holds.

    Returns:
        Ascending orders whose product is `order`, each of one matrix: Sylvester's or Paley's where products of these
            reach the order, else of the other constructions too.

    Raises:
        ValueError: if the order cannot be constructed; the message is `hadamard_obstacle`'s.
    """
    factors = _cheapest_factors(order)
    if factors is None:
        raise ValueError(hadamard_obstacle(order))
    return factors


def is_constructible(order: int) -> bool:
    """Tell whether `hadamard` can construct this order; false for every order below 1."""
    return _cheapest_factors(order) is not None


def hadamard_obstacle(order: int) -> str | None:
    """Say why `hadamard` cannot construct this order, and which nearest ones it can; None if it can."""
    if is_constructible(order):
        return None
    if order < 1:
        return f"no Hadamard matrix of order {order} exists: the order must be positive"
    reason = f"no construction known here for order {order}"
    if order % 4:
        reason = f"no Hadamard matrix of order {order} exists: the order must be 1, 2 or a multiple of 4"
    below = next(near for near in count(order - 1, -1) if is_constructible(near))
    above = next(near for near in count(order + 1) if is_constructible(near))
    return f"{reason} (the nearest orders are {below} and {above})"


def largest_block(*widths: int) -> int | None:
    """Return the largest order above 1 of a Hadamard matrix that divides all the widths; None if there is none."""
    return next((size for size in reversed(divisors(math.gcd(*widths))) if size > 1 and is_constructible(size)), None)


def random_hadamard(order: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw `diag(signs) @ hadamard(order) / sqrt(order)` with independent random signs.

    Args:
        order: 1, 2 or a multiple of 4 for which `is_constructible` holds.
        generator: a CPU generator; it alone decides the signs.
        dtype: a floating-point type.

    Returns:
        matrix: (order, order) `dtype` on the CPU, orthogonal up to the rounding of its entries.

    Raises:
        ValueError: if the order cannot be constructed.
    """
    matrix = hadamard(order).to(dtype)
    signs = 1 - 2 * torch.randint(2, (order, 1), generator=generator, device="cpu")
    return matrix.mul_((signs.double() / math.sqrt(order)).to(dtype))


def random_orthogonal(order: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw an orthogonal matrix uniformly (from the Haar measure), by QR of a Gaussian matrix in float64.

    The signs of R's diagonal are moved into Q, without which Q is not uniform (Mezzadri, "How to generate random
    matrices from the classical compact groups", Notices of the AMS 54, 2007, section 5). The last bits depend on the
    number of threads that LAPACK uses: draw on one rank and broadcast.

    Args:
        order: any positive order.
        generator: a CPU generator; it alone decides the matrix.
        dtype: a floating-point type, to which the float64 result is rounded.

    Returns:
        matrix: (order, order) `dtype` on the CPU, contiguous.

    Raises:
        ValueError: if the order is below 1.
    """
    if order < 1:
        raise ValueError(f"order {order} is not positive: an orthogonal matrix needs an order of 1 or more")
    gaussian = torch.randn(order, order, generator=generator, dtype=torch.float64, device="cpu")
    orthogonal: Tensor
    triangular: Tensor
    orthogonal, triangular = torch.linalg.qr(gaussian)
    signs = torch.ones(order, dtype=torch.float64, device="cpu").copysign(triangular.diagonal())
    return (orthogonal * signs).to(dtype).contiguous()


@dataclass(frozen=True)
class HadamardTransform:
    """The orthonormal Hadamard transform of each block of the last dimension, `x @ hadamard(order) / sqrt(order)`.

    It multiplies by one Kronecker factor at a time: sum(factors) multiply-adds per element in place of `order`. It is
    differentiable, and saves nothing of x for the backward. It holds no tensors, so it copies and pickles freely.

    Attributes:
        order: 1, 2 or a multiple of 4 for which `is_constructible` holds.
        blocks: how many blocks of that order lie side by side, each transformed alone.
        factors: what `hadamard_factors` makes of the order; not an argument.

    Raises:
        ValueError: if the order cannot be constructed, or there is no block.
    """

    order: int
    blocks: int = field(default=1, kw_only=True)
    factors: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        factors = hadamard_factors(self.order)
        if self.blocks < 1:
            raise ValueError(f"a Hadamard transform of {self.blocks} blocks transforms nothing: 1 or more are needed")
        object.__setattr__(self, "factors", factors)

    @property
    def width(self) -> int:
        """The size of the dimension it transforms: `blocks * order`."""
        return self.blocks * self.order

    def __call__(self, x: Tensor) -> Tensor:
        """Transform x.

        Args:
            x: (..., width), floating point, on any device.

        Returns:
            transformed: (..., width), the dtype and device of x, also under autocast.

        Raises:
            ValueError: if the last dimension of x is not `width`.
        """
        if x.dim() == 0 or x.shape[-1] != self.width:
            fitting = f"a Hadamard transform of order {self.order} on a width of {self.width}"
            raise ValueError(f"x of shape {tuple(x.shape)} does not fit {fitting}")
        with _without_autocast(x.device.type):
            matrices = [_scaled_matrix(factor, dtype=x.dtype, device=x.device) for factor in self.factors]
            return _multiply_kronecker(x, matrices=matrices, scale=_remaining_scale(self.factors))

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the transform as a dense matrix: (width, width) `dtype` on the CPU, the caller's own."""
        block = hadamard(self.order).to(dtype).mul_(1 / math.sqrt(self.order))
        return torch.kron(torch.eye(self.blocks, dtype=dtype, device="cpu"), block)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    available = torch.amp.is_autocast_available(device_type)  # not on the meta device
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def _multiply_kronecker(x: Tensor, *, matrices: list[Tensor], scale: float) -> Tensor:
    """Multiply x, block by block, by `scale` times the Kronecker product of square matrices, the last matrix first."""
    inner = matrices[-1].shape[0]
    # addmm applies the scale inside the product, which spares a pass over x and one rounding; beta=0 ignores the zero.
    product = torch.addmm(x.new_zeros(()), x.reshape(-1, inner), matrices[-1], beta=0, alpha=scale)
    for matrix in reversed(matrices[:-1]):
        product = matrix.T @ product.reshape(-1, matrix.shape[0], inner)
        inner *= matrix.shape[0]
    return product.reshape(x.shape)


def _remaining_scale(factors: tuple[int, ...]) -> float:
    """What is left of 1 / sqrt(order) after the powers of two that `_scaled_matrix` holds."""
    return 2.0 ** sum(map(_half_exponent, factors)) / math.sqrt(math.prod(factors))


def _half_exponent(factor: int) -> int:
    return (factor.bit_length() - 1) // 2


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _scaled_matrix(factor: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Let torch.compile take the cached factor as a constant; it would trace through `lru_cache` itself."""
    return _cached_scaled_matrix(factor, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _cached_scaled_matrix(factor: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keep one factor per dtype and device, never to be handed out or written to.

    Its scale is a power of two, so that every dtype holds it exactly; `_remaining_scale` is the rest.
    """
    with torch.inference_mode(False):  # a tensor created in inference mode could not serve a later backward
        scaled = _direct_matrix(factor).to(torch.float64) * 2.0 ** -_half_exponent(factor)
        return scaled.to(device=device, dtype=dtype)


def _cheapest_factors(order: int) -> tuple[int, ...] | None:
    """Return the cheapest product in the first tier that has one; a later tier never changes what an earlier gives."""
    return next((factors for tier in _Tier if (factors := _cheapest_in(tier, order))), None)


class _Tier(IntEnum):
    """Which orders one matrix may have; each tier includes those before it, and an order uses the first that does."""

    paley = 0
    sequences = 1
    halved_product = 2


@lru_cache(maxsize=65536)
def _cheapest_in(tier: _Tier, order: int) -> tuple[int, ...] | None:
    """Choose among all products of direct orders the one with the least cost, then the fewest factors."""
    if _is_direct(tier, order) and order <= _PASS_COST:
        return (order,)
    if order < 1 or order % 4:
        return None
    candidates: list[tuple[int, ...]] = [(order,)] if _is_direct(tier, order) else []
    for factor in divisors(order):
        rest = _cheapest_in(tier, order // factor) if 1 < factor < order and _is_direct(tier, factor) else None
        if rest is not None:
            candidates.append(tuple(sorted((factor, *rest))))
    return min(candidates, key=_cost, default=None)


def _cost(factors: tuple[int, ...]) -> tuple[int, int]:
    return sum(factors) + _PASS_COST * len(factors), len(factors)


def _is_direct(tier: _Tier, order: int) -> bool:
    if is_sylvester(order) or is_first_paley(order) or is_second_paley(order):
        return True
    if tier >= _Tier.sequences and (has_goethals_seidel(order) or _is_miyamoto(order)):
        return True
    return tier >= _Tier.halved_product and _halves(order) is not None


def _is_miyamoto(order: int) -> bool:
    return order % 16 == 4 and is_symmetric_conference(order // 4 + 1) and is_constructible(order // 4 - 1)


def _halves(order: int) -> tuple[int, int] | None:
    """Return the orders 4a and 4b, the first the smallest, of two Hadamard matrices that make one of order 8ab."""
    if order < 1 or order % 8:
        return None
    pairs = ((4 * a, order // (2 * a)) for a in divisors(order // 8))
    return next((pair for pair in pairs if pair[0] > 4 and all(map(is_constructible, pair))), None)


def _direct_matrix(order: int) -> Tensor:
    """Construct one matrix, by the first of the constructions that has its order."""
    if is_sylvester(order):
        return sylvester_matrix(order)
    if is_first_paley(order):
        return first_paley_matrix(order)
    if is_second_paley(order):
        return second_paley_matrix(order)
    if has_goethals_seidel(order):
        return goethals_seidel_matrix(order)
    if _is_miyamoto(order):
        return miyamoto(conference_matrix(order // 4 + 1), hadamard(order // 4 - 1))
    halves = _halves(order)
    assert halves is not None, f"no matrix of order {order} is direct"
    return agayan_sarukhanyan(hadamard(halves[0]), hadamard(halves[1]))
