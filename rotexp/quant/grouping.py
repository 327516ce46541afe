"""How a tensor is cut into groups, and in which dtype they are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_by(x: Tensor, *, groups: int) -> Tensor:
    """View `(..., width)` as `(..., groups, group_size)`."""
    return torch.unflatten(x, -1, (groups, x.shape[-1] // groups))


def computed(x: Tensor) -> Tensor:
    """Return a tensor in float32, or float64 if it is; the tensor itself if it has that dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sum_groups(values: Tensor, *, like: Tensor) -> Tensor:
    """Add up each group of `(..., width)`; the sums `(..., groups)` have shape and dtype of `like`."""
    return grouped_by(values, groups=like.shape[-1]).sum(-1).to(like.dtype)
