"""Quantizing in a rotated basis moves rotations as the products written out do, and keeps one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.hadamard import random_orthogonal
from rotexp.rotation.round_trip import round_trip

WIDTH = 24
SPECS = [QuantSpec(4, symmetric=False), QuantSpec(4, group_size=8), QuantSpec(4, symmetric=False, clip_ratio=0.8)]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(blocks: int | None) -> Tensor:
    order = WIDTH if blocks is None else WIDTH // 3
    generator = torch.Generator().manual_seed(0)
    drawn = [random_orthogonal(order, generator=generator, dtype=torch.float64) for _ in range(blocks or 1)]
    return torch.stack(drawn) if blocks == 3 else drawn[0]


@pytest.mark.parametrize("spec", SPECS, ids=["asymmetric", "symmetric", "clipped"])
@pytest.mark.parametrize("blocks", [None, 1, 3], ids=["whole", "repeated", "blocks"])
def test_values_and_riemannian_gradients_are_those_of_the_products(spec: QuantSpec, blocks: int | None) -> None:
    rotation, quantizer = RotationBank().add("R", orthogonal(blocks)), FakeQuantizer(spec)
    x, upstream = normal(2, 5, WIDTH, seed=1).requires_grad_(), normal(2, 5, WIDTH, seed=2)
    expected = rotation.unrotate(quantizer(rotation.rotate(x)))
    result = round_trip(x, rotation=rotation.matrix, quantizer=quantizer)
    torch.testing.assert_close(result, expected)
    leaves = [x, rotation.matrix]
    mine, theirs = (torch.autograd.grad(y, leaves, upstream) for y in (result, expected))
    torch.testing.assert_close(mine[0], theirs[0])
    skew = [(gradient @ rotation.matrix.mT).detach() for gradient in (mine[1], theirs[1])]
    torch.testing.assert_close(skew[0] - skew[0].mT, skew[1] - skew[1].mT)


def test_only_the_rounding_error_is_kept_and_that_only_for_a_learned_rotation() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x, rotation = normal(5, WIDTH, seed=1).requires_grad_(), orthogonal(None)
    for learned in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            round_trip(x, rotation=rotation.requires_grad_(learned), quantizer=FakeQuantizer(QuantSpec(4)))
        assert [tensor.shape for tensor in saved] == [x.shape, rotation.shape] * learned


def test_a_quantizer_that_is_off_returns_the_very_tensor() -> None:
    x = normal(5, WIDTH, seed=1)
    assert round_trip(x, rotation=orthogonal(None), quantizer=FakeQuantizer(QuantSpec())) is x
