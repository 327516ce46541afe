"""How far rotations are from orthogonal, and from where they started."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rotexp.orthogonal.stiefel import orthogonality_error


@torch.no_grad()
def rotation_metrics(rotations: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest orthogonality errors and the largest distance from the start over all rotations.

    A block-diagonal rotation counts as its blocks do: their largest, not their mean.

    Args:
        rotations, start: (n, n) or (blocks, n, n) each, under the same names.
    """
    shapes: dict[torch.Size, list[str]] = defaultdict(list)
    for name, matrix in rotations.items():
        shapes[matrix.shape].append(name)
    rows = []
    for shape, names in shapes.items():
        now = torch.stack([rotations[name] for name in names])
        moved = now - torch.stack([start[name] for name in names])
        figures = (*orthogonality_error(now), torch.linalg.matrix_norm(moved) / shape[-1] ** 0.5)
        rows.append(torch.stack([figure.max().double() for figure in figures]))
    rrt, rtr, distance = torch.stack(rows).amax(0).tolist() if rows else (0.0, 0.0, 0.0)
    return {
        "rotation/orthogonality_rrt_max": rrt,
        "rotation/orthogonality_rtr_max": rtr,
        "rotation/distance_from_init": distance,
    }


@torch.no_grad()
def rotation_rows(
    rotations: Mapping[str, Tensor], start: Mapping[str, Tensor], *, divergence: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return a row of figures for every rotation, in their order; of a block-diagonal one, those of its worst block.

    Args:
        rotations, start: (n, n) or (blocks, n, n) each, under the same names.
        divergence: the largest difference between ranks of the rotations that differ.

    Returns:
        Rows of `rotation`, `layer` (None for one that no layer owns), `order`, `blocks`, `orthogonality_rrt_max`,
        `orthogonality_rtr_max`, `distance_from_init` and `max_abs_diff`.
    """
    rows = []
    for name, matrix in rotations.items():
        layer = re.search(r"_(\d+)$", name)
        figures = rotation_metrics({name: matrix}, start)
        rows.append(
            {
                "rotation": name,
                "layer": int(layer[1]) if layer else None,
                "order": matrix.shape[-1],
                "blocks": matrix.shape[0] if matrix.ndim == 3 else 1,
                **{key.split("/")[1]: value for key, value in figures.items()},
                "max_abs_diff": (divergence or {}).get(name, 0.0),
            }
        )
    return rows


def largest(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest drift of all rows of `rotation_rows`: max|R Rᵀ − I| and max|Rᵀ R − I|, 0 without rows."""
    figures = ("orthogonality_rrt_max", "orthogonality_rtr_max")
    return {figure: max((row[figure] for row in rows), default=0.0) for figure in figures}
