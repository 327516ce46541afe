"""Hadamard matrices made of smaller ones, of orders that no Kronecker product has."""

import torch
from torch import Tensor

from rotexp.orthogonal.paley import sylvester_matrix


def miyamoto(conference: Tensor, smaller: Tensor) -> Tensor:
    """Combine a symmetric conference matrix of order q + 1 with a Hadamard matrix of order q - 1.

    M. Miyamoto, "A construction of Hadamard matrices", Journal of Combinatorial Theory A 57, 1991. With the conference
    matrix brought to [[0, 1, e, e], [1, 0, e, -e], [e', e', C₁, C₂], [e', -e', C₃, C₄]], let U = [[C, 0], [0, C]] and
    V = [[I, K], [-K', I]], K the Hadamard matrix: U Uᵀ is q I - 2 J in each of 4 × 4 blocks' diagonal, V Vᵀ is q I,
    and U ± V has no zeros. Each of those blocks becomes [[U + V, U - V], [U - V, U + V]] with a border of signs.

    Args:
        conference: (q + 1, q + 1) int8, from `conference_matrix`, q ≡ 1 mod 4.
        smaller: (q - 1, q - 1) int8, a Hadamard matrix.

    Returns:
        matrix: (4q, 4q) int8, a Hadamard matrix.
    """
    size = smaller.shape[0]
    identity = torch.eye(size, dtype=torch.int8, device=smaller.device)
    core = _normalized_core(conference)
    u = torch.kron(torch.eye(2, dtype=torch.int8, device=core.device), core).view(4, size // 2, 4, size // 2)
    v = torch.cat([torch.cat([identity, smaller], 1), torch.cat([-smaller.T, identity], 1)]).view_as(u)
    matrix = smaller.new_empty(4, size + 1, 4, size + 1)
    rows = torch.stack([torch.cat([u + v, u - v], 3), torch.cat([u - v, u + v], 3)], 1)
    matrix[:, 1:, :, 1:] = rows.view(4, size, 4, size)
    matrix[:, 0, :, 0], row, column = _border(smaller)
    matrix[:, 0, :, 1:], matrix[:, 1:, :, 0] = row.unsqueeze(-1), column.unsqueeze(1)
    return matrix.view(4 * (size + 1), -1)


def _normalized_core(conference: Tensor) -> Tensor:
    """Drop the first two rows and columns, after sorting the others by the sign they have in the second."""
    order = conference[1, 2:].argsort(descending=True, stable=True) + 2
    return conference[order][:, order]


def _border(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return corners, row signs and column signs of the 4 × 4 blocks.

    The four blocks on the diagonal have the row sums -2, 2, -2, 2, the others 0; so the rows are orthogonal if the
    three are Hadamard matrices with `corners @ columns.T == -2 * rows * [-1, 1, -1, 1]`.
    """
    signs = sylvester_matrix(4).to(like)
    corners = signs.clone()
    corners[0] = -1
    columns = 1 - 2 * torch.eye(4, dtype=like.dtype, device=like.device)
    return corners, signs * like.new_tensor([-1, 1, -1, 1]), columns


def agayan_sarukhanyan(left: Tensor, right: Tensor) -> Tensor:
    """Combine Hadamard matrices of orders 4a and 4b into one of order 8ab, half that of their Kronecker product.

    S. S. Agayan, "Hadamard Matrices and Their Applications", Lecture Notes in Mathematics 1168, 1985, on a theorem
    with A. G. Sarukhanyan: the halves P, Q of `left`'s columns give (P + Q) / 2 and (P - Q) / 2, which have disjoint
    supports and multiply the upper and the lower half of `right`'s rows.

    Args:
        left: (4a, 4a) int8.
        right: (4b, 4b) int8.

    Returns:
        matrix: (8ab, 8ab) int8, a Hadamard matrix.
    """
    first, second = left.chunk(2, dim=1)
    upper, lower = right.chunk(2, dim=0)
    return torch.kron((first + second) // 2, upper) + torch.kron((first - second) // 2, lower)
