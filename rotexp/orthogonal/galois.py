"""Finite fields of any prime-power order, small enough to tabulate, as the Paley constructions need them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4096)
def prime_power(order: int) -> tuple[int, int] | None:
    """Split a prime power into its prime and its exponent.

    Args:
        order: any integer.

    Returns:
        `(characteristic, degree)` with `characteristic ** degree == order`, or None if there is no such pair.
    """
    if order < 2:
        return None
    characteristic = _smallest_prime_factor(order)
    degree, rest = 0, order
    while rest % characteristic == 0:
        degree, rest = degree + 1, rest // characteristic
    return (characteristic, degree) if rest == 1 else None


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _smallest_prime_factor(number: int) -> int:
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return divisor
        divisor += 1
    return number


@dataclass(frozen=True)
class GaloisField:
    """The field of `characteristic ** degree` elements, written as the integers 0 to order - 1.

    The base-`characteristic` digits of an element are the coefficients of a polynomial, lowest power first; 0 and 1
    are the field's own zero and one. All operations take and give int64 tensors of any (broadcastable) shape.

    Attributes:
        characteristic: the prime.
        degree: the exponent.
        powers: the order - 1 nonzero elements as successive powers of one generator, starting with 1.
    """

    characteristic: int
    degree: int
    powers: tuple[int, ...]

    @property
    def order(self) -> int:
        """The number of elements."""
        return len(self.powers) + 1

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Add elementwise: digit by digit, without carry."""
        return self._element(self._digits(left) + self._digits(right))

    def subtract(self, left: Tensor, right: Tensor) -> Tensor:
        """Subtract elementwise: digit by digit, without borrowing."""
        return self._element(self._digits(left) - self._digits(right))

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply elementwise, by adding the exponents of the generator."""
        exponents = self._exponents()
        exponent = (exponents[left] + exponents[right]) % len(self.powers)
        return torch.where((left == 0) | (right == 0), 0, self._power_table()[exponent])

    def quadratic_character(self) -> Tensor:
        """Tell squares from non-squares in a field of odd order.

        Returns:
            character: (order,) int8, 0 for zero, 1 for the nonzero squares, -1 for the others.
        """
        assert self.characteristic != 2, "in characteristic 2 every element is a square"
        powers = self._power_table()
        character = torch.zeros(self.order, dtype=torch.int8, device="cpu")
        character[powers[0::2]] = 1
        character[powers[1::2]] = -1
        return character

    def _digits(self, elements: Tensor) -> Tensor:
        return elements.unsqueeze(-1) // self._place_values() % self.characteristic

    def _element(self, digits: Tensor) -> Tensor:
        return (digits % self.characteristic * self._place_values()).sum(-1)

    def _place_values(self) -> Tensor:
        return torch.tensor([self.characteristic**place for place in range(self.degree)], device="cpu")

    def _power_table(self) -> Tensor:
        return torch.tensor(self.powers, dtype=torch.int64, device="cpu")

    def _exponents(self) -> Tensor:
        exponents = torch.zeros(self.order, dtype=torch.int64, device="cpu")
        exponents[self._power_table()] = torch.arange(len(self.powers), device="cpu")
        return exponents


@lru_cache(maxsize=128)
def galois_field(order: int) -> GaloisField:
    """Construct the field of a given order, from the first primitive polynomial in lexicographic order.

    A monic polynomial f of degree k over GF(p) is primitive if the powers of x modulo f run through all p**k - 1
    nonzero residues. Then every nonzero residue is invertible, so f is irreducible, and x is the generator.

    Args:
        order: a prime power.

    Raises:
        ValueError: if `order` is not a prime power.
    """
    split = prime_power(order)
    if split is None:
        raise ValueError(f"no finite field has order {order}: the order must be a prime power")
    characteristic, degree = split
    for remainder in itertools.product(range(characteristic), repeat=degree):
        powers = tuple(_powers_of_x(remainder, characteristic=characteristic))
        if len(powers) == order - 1:
            return GaloisField(characteristic, degree, powers)
    raise AssertionError(f"GF({order}) has a primitive polynomial")


def _powers_of_x(remainder: tuple[int, ...], *, characteristic: int) -> Iterator[int]:
    """Yield 1, x, x**2, … until 1 returns, where `remainder` holds the digits of x**degree, lowest power first."""
    if remainder[0] == 0:
        return  # x divides the polynomial: 1 would never return
    one = (1,) + (0,) * (len(remainder) - 1)
    digits = one
    while True:
        yield sum(digit * characteristic**place for place, digit in enumerate(digits))
        shifted, overflow = (0, *digits[:-1]), digits[-1]
        digits = tuple((low + overflow * high) % characteristic for low, high in zip(shifted, remainder, strict=True))
        if digits == one:
            return
