"""Check that a start of rotations draws orthogonal matrices, alike on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotexp.rotation.start import RotationStart, fault_of_start
from rotexp.testing.rules import check_members, disturb, rule

SHAPES = {"R1": (64, 64), "R2_0": (16, 16), "R2_1": (16, 16), "blocks": (4, 32, 32)}


def check_start(cls: type[Any], *, ignores_seed: bool = False, **options: Any) -> None:
    """Let a start draw rotations of orders 64 and 16 and a stack of blocks of order 32.

    Args:
        cls: called as `cls(**options)`, see `rotexp.rotation.start.RotationStart`.
        ignores_seed: whether it is meant to be the same for every seed, as the identity is.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    disturb(1)
    drawn = {name: _drawn(cls, options, name) for name in SHAPES}
    for name, matrix in drawn.items():
        fault = fault_of_start(matrix, SHAPES[name])
        assert not fault, f"cls(**options)({SHAPES[name]}, …): {fault}"
    disturb(2)
    again = {name: _drawn(cls, options, name) for name in reversed(SHAPES)}
    for name, matrix in drawn.items():
        same = torch.equal(matrix, again[name])
        assert same, f"cls(**options)({SHAPES[name]}, …): draws other bits when asked again; use seed and name alone"

    other = {name: _drawn(cls, options, name, seed=1) for name in SHAPES}
    differs = any(not torch.equal(matrix, other[name]) for name, matrix in drawn.items())
    assert differs or ignores_seed, (
        "cls(**options)(…): draws the same for every seed; if it is to, set ignores_seed=True"
    )
    assert not (differs and ignores_seed), (
        "cls(**options)(…): draws others for another seed, although ignores_seed=True"
    )


def _drawn(cls: type[Any], options: dict[str, Any], name: str, seed: int = 0) -> Tensor:
    with rule("cls(**options)"):
        start: RotationStart = cls(**options)
    check_members(start, RotationStart)
    with rule(f"cls(**options)({SHAPES[name]}, name={name!r}, seed={seed})"):
        return start(SHAPES[name], name=name, seed=seed)
