"""Williamson's four symmetric rows of signs whose autocorrelations cancel."""

import torch
from torch import Tensor

from rotexp.orthogonal.galois import GaloisField, galois_field, prime_power
from rotexp.orthogonal.sequences import sign_row, stored


def has_williamson(length: int) -> bool:
    """Tell whether `williamson_rows` has the length: 1, a stored one, or (q + 1) / 2, q ≡ 1 mod 4 a prime power."""
    return length == 1 or str(length) in stored()["williamson"] or _is_turyn(length)


def williamson_rows(length: int) -> list[Tensor]:
    """Return four symmetric rows of signs whose periodic autocorrelations sum to zero (J. Williamson, 1944).

    Args:
        length: one for which `has_williamson` holds.

    Returns:
        rows: four (length,) int8 on the CPU, with `row[i] == row[-i]`.
    """
    if length == 1:
        return [sign_row("+")] * 4
    rows = stored()["williamson"].get(str(length))
    return list(map(sign_row, rows)) if rows else _turyn_rows(length)


def _is_turyn(length: int) -> bool:
    return length % 2 == 1 and prime_power(2 * length - 1) is not None


def _turyn_rows(length: int) -> list[Tensor]:
    """Cut the symmetric conference matrix of order q + 1 into circulants [[Q, R], [R, -Q]] of length (q + 1) / 2.

    R. J. Turyn, "An infinite class of Williamson matrices", Journal of Combinatorial Theory A 12, 1972; written here
    as quadratic characters of the imaginary and real parts of 1, v², v⁴, … in the field of q² elements, where the
    powers of v² pass through all of its classes modulo the field of q; v² is divided by v's norm, so that they return.
    """
    field = galois_field(2 * length - 1)
    character = field.quadratic_character().long()
    non_square = torch.tensor(field.powers[1], device="cpu")
    for root in torch.arange(1, field.order, device="cpu"):
        square = field.multiply(root, root)
        step = field.add(square, non_square), field.add(root, root)
        real, imaginary = _powers(field, step, non_square, count=length)
        if imaginary.count_nonzero() == length - 1:
            norms = character[field.subtract(square, non_square)] ** torch.arange(length, device="cpu")
            q, r = ((norms * character[part]).to(torch.int8) for part in (imaginary, real))
            unit = torch.zeros_like(q)
            unit[0] = 1
            return [unit + q, unit - q, r, r]
    raise AssertionError(f"the field of {field.order}² elements has a generator")


Complex = tuple[Tensor, Tensor]
"""Real and imaginary parts in a finite field, over a root of one of its non-squares."""


def _powers(field: GaloisField, base: Complex, non_square: Tensor, *, count: int) -> Complex:
    """Return the powers 0 to count - 1, doubling their number by one product each time."""
    powers = torch.ones(1, dtype=torch.int64, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
    while len(powers[0]) < count:
        more = _multiply(field, powers, base, non_square)
        powers = torch.cat([powers[0], more[0]]), torch.cat([powers[1], more[1]])
        base = _multiply(field, base, base, non_square)
    return powers[0][:count], powers[1][:count]


def _multiply(field: GaloisField, left: Complex, right: Complex, non_square: Tensor) -> Complex:
    (a, b), (c, d) = left, right
    real = field.add(field.multiply(a, c), field.multiply(non_square, field.multiply(b, d)))
    return real, field.add(field.multiply(a, d), field.multiply(b, c))
