"""What makes a matrix a Hadamard matrix, checked in integers."""

import torch
from torch import Tensor


def assert_hadamard(matrix: Tensor) -> None:
    order = matrix.shape[0]
    assert matrix.shape == (order, order)
    assert matrix.dtype == torch.int8
    assert torch.equal(matrix.abs(), torch.ones_like(matrix))
    # Products of signs and sums up to 2**24 are exact in float32, so this is an equality of integers.
    assert torch.equal(matrix.float() @ matrix.float().T, order * torch.eye(order))
