"""A digest of weights differs when any number, name or place does, and leaves out what is trained as rotations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotexp.sharding import digest
from rotexp.sharding.communication import Communication
from rotexp.sharding.digest import weights_digest


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(7, 5, generator=generator).to(dtype))
        self.gain = nn.Parameter(torch.randn(3, generator=generator).to(dtype))


def digest_of(net: nn.Module) -> str:
    return weights_digest(net, communication=Communication())


def flip_lowest_bit(net: Net) -> None:
    net.weight.detach().view(torch.int32)[6, 4] ^= 1


def swap_numbers(net: Net) -> None:
    row = net.weight.detach()[2]
    row[[0, 3]] = row[[3, 0]]


def swap_rows(net: Net) -> None:
    weight = net.weight.detach()
    weight[[1, 5]] = weight[[5, 1]]


def negate_zero(net: Net) -> None:
    net.gain.detach()[0] = -0.0


@pytest.mark.parametrize("change", [flip_lowest_bit, swap_numbers, swap_rows])
def test_any_change_is_seen(change: Callable[[Net], None]) -> None:
    net = Net()
    before = digest_of(net)
    change(net)
    assert digest_of(net) != before


def test_the_sign_of_zero_is_seen() -> None:
    net = Net()
    net.gain.detach()[0] = 0.0
    before = digest_of(net)
    negate_zero(net)
    assert digest_of(net) != before


def test_the_same_weights_have_the_same_digest_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digest_of(Net())
    assert len(whole) == 16
    assert int(whole, 16) >= 0
    monkeypatch.setattr(digest, "CHUNK_ELEMENTS", 7)
    assert digest_of(Net()) == whole


def test_a_name_counts() -> None:
    renamed = nn.Module()
    renamed.register_parameter("weight", Net().weight)
    renamed.register_parameter("other", Net().gain)
    assert digest_of(renamed) != digest_of(Net())


def test_what_is_ignored_does_not_count() -> None:
    net = Net()
    before = weights_digest(net, communication=Communication(), ignored={net.gain})
    net.gain.detach().mul_(2.0)
    assert weights_digest(net, communication=Communication(), ignored={net.gain}) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_has_a_digest(dtype: torch.dtype) -> None:
    net = Net(dtype)
    before = digest_of(net)
    net.gain.detach()[1] *= 2.0
    assert digest_of(net) != before
