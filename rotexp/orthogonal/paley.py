"""The Hadamard matrices of Sylvester and Paley, and the conference matrices behind Paley's."""

import torch
from torch import Tensor

from rotexp.orthogonal.galois import galois_field, prime_power


def is_sylvester(order: int) -> bool:
    """Tell whether the order is a power of two."""
    return order > 0 and order & (order - 1) == 0


def is_first_paley(order: int) -> bool:
    """Tell whether the order is q + 1 for a prime power q ≡ 3 mod 4."""
    return order % 4 == 0 and prime_power(order - 1) is not None


def is_second_paley(order: int) -> bool:
    """Tell whether the order is 2 (q + 1) for a prime power q ≡ 1 mod 4."""
    return order % 4 == 0 and is_symmetric_conference(order // 2)


def is_symmetric_conference(order: int) -> bool:
    """Tell whether `conference_matrix` has this order and is symmetric: q + 1 for a prime power q ≡ 1 mod 4."""
    return order % 4 == 2 and prime_power(order - 1) is not None


def sylvester_matrix(order: int) -> Tensor:
    """Double [[1]] until it has the order: H becomes [[H, H], [H, -H]] (Sylvester 1867); int8 on the CPU."""
    matrix = _signs([[1]])
    while matrix.shape[0] < order:
        matrix = torch.kron(_signs([[1, 1], [1, -1]]), matrix)
    return matrix


def first_paley_matrix(order: int) -> Tensor:
    """Add the identity to the skew-symmetric conference matrix of the same order (Paley 1933); int8 on the CPU."""
    conference = conference_matrix(order)
    conference[1:, 0] = -1
    return conference + torch.eye(order, dtype=torch.int8, device="cpu")


def second_paley_matrix(order: int) -> Tensor:
    """Put 2 × 2 blocks into the symmetric conference matrix of half the order (Paley 1933); int8 on the CPU."""
    identity = torch.eye(order // 2, dtype=torch.int8, device="cpu")
    off_diagonal = torch.kron(conference_matrix(order // 2), _signs([[1, 1], [1, -1]]))
    return off_diagonal + torch.kron(identity, _signs([[1, -1], [-1, -1]]))


def conference_matrix(order: int) -> Tensor:
    """Border the differences' quadratic characters in the field of `order - 1` elements with ones.

    Args:
        order: q + 1 for an odd prime power q.

    Returns:
        C: (order, order) int8 on the CPU, 0 on the diagonal, 1 and -1 elsewhere. For q ≡ 1 mod 4 it is symmetric and
            `C @ C.T == q * identity`; for q ≡ 3 mod 4 that holds once the first column is negated.
    """
    galois = galois_field(order - 1)
    character = galois.quadratic_character()
    elements = torch.arange(galois.order, device="cpu")
    conference = torch.ones(order, order, dtype=torch.int8, device="cpu")
    conference[0, 0] = 0
    for row, element in enumerate(elements, start=1):
        conference[row, 1:] = character[galois.subtract(element, elements)]
    return conference


def _signs(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int8, device="cpu")
