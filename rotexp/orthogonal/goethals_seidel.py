"""Hadamard matrices of order 4n from four sequences of length n: T-sequences, Williamson's, and stored ones."""

from functools import lru_cache, reduce

import torch
from torch import Tensor

from rotexp.orthogonal.galois import divisors
from rotexp.orthogonal.sequences import has_t_sequences, stored_rows, t_sequences
from rotexp.orthogonal.williamson import has_williamson, williamson_rows


@lru_cache(maxsize=65536)
def four_sequences(length: int) -> tuple[int, int] | None:
    """Split a length into that of T-sequences and that of Williamson's: (t, w) with t * w == length.

    Returns:
        (t, w), of which t is the largest; None if there is no such pair.
    """
    pairs = ((t, length // t) for t in reversed(divisors(length)))
    return next(((t, w) for t, w in pairs if has_t_sequences(t) and has_williamson(w)), None)


def has_goethals_seidel(order: int) -> bool:
    """Tell whether `goethals_seidel_matrix` has the order."""
    return order > 0 and order % 4 == 0 and (order // 4 in stored_rows() or four_sequences(order // 4) is not None)


def goethals_seidel_matrix(order: int) -> Tensor:
    """Construct the Hadamard matrix of four stored first rows, or of T-sequences and Williamson's rows.

    Args:
        order: a multiple of 4 for which `has_goethals_seidel` holds.

    Returns:
        matrix: (order, order) int8 on the CPU.
    """
    length = order // 4
    if length in stored_rows():
        return _array(*map(_circulant, stored_rows()[length]))
    split = four_sequences(length)
    assert split is not None, f"no four sequences of length {length} are known here"
    return _array(*_cooper_wallis(*split))


def _circulant(row: Tensor) -> Tensor:
    """Shift the first row one place to the right for each further row."""
    index = torch.arange(len(row), device=row.device)
    return row[(index - index[:, None]) % len(row)]


def _cooper_wallis(t: int, w: int) -> list[Tensor]:
    """Put Williamson's circulants A to D into the T-circulants (J. Cooper and J. Wallis, 1972).

    The four are signed sums of Kronecker products, without zeros, and X Xᵀ + Y Yᵀ + Z Zᵀ + W Wᵀ is 4tw I.
    """
    shifts = [_circulant(row) for row in t_sequences(t)]
    a, b, c, d = map(_circulant, williamson_rows(w))
    quadruples = [(a, b, c, d), (-b, a, d, -c), (-c, -d, a, b), (-d, c, -b, a)]
    return [reduce(torch.add, map(torch.kron, shifts, quadruple)) for quadruple in quadruples]


def _array(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Arrange four (block) circulants whose sum of M Mᵀ is 4n I (J. M. Goethals and J. J. Seidel, 1967).

    A circulant with its columns reversed is symmetric, so that any two products that must cancel do commute.
    """
    br, cr, dr = b.flip(1), c.flip(1), d.flip(1)
    bt, ct, dt = b.T.flip(1), c.T.flip(1), d.T.flip(1)
    rows = [[a, br, cr, dr], [-br, a, dt, -ct], [-cr, -dt, a, bt], [-dr, ct, -bt, a]]
    return torch.cat([torch.cat(row, 1) for row in rows])
