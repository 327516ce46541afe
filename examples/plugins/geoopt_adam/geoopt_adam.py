"""Riemannian Adam of geoopt as an optimizer of rotations: `pip install 'rotexp[bench]'`.

In this folder: `python -m rotexp.train --config-dir conf plugins=[geoopt_adam] optimizer=geoopt_adam`.

Source: Bécigneul and Ganea, "Riemannian Adaptive Optimization Methods", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import geoopt
import torch
from torch import Tensor


class RiemannianAdam(geoopt.optim.RiemannianAdam):
    """Moves rotations, (n, n) or (blocks, n, n), on the Stiefel manifold under the Euclidean metric, by QR retractions.

    Args:
        lr: Adam's; the second moment is one number a matrix, so that it is about the length of a step.
        beta1, beta2: of the first and second moments.
    """

    _default_manifold = geoopt.EuclideanStiefel()
    """What geoopt takes parameters that are no `ManifoldParameter` to lie on."""

    def __init__(self, params: Iterable[Tensor], lr: float, beta1: float = 0.9, beta2: float = 0.999) -> None:
        super().__init__(params, lr=lr, betas=(beta1, beta2))

    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        """Return a count of steps and two moments, as geoopt makes them before the first step."""
        return {"step": 0, "exp_avg": torch.zeros_like(rotation), "exp_avg_sq": torch.zeros_like(rotation)}

    @torch.no_grad()
    def project(self) -> None:
        """Replace every rotation by the orthogonal matrix nearest to it."""
        for group in self.param_groups:
            for rotation in group["params"]:
                rotation.copy_(self._default_manifold.projx(rotation))
