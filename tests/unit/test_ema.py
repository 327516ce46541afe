"""The average follows its formula, is used with orthogonal rotations, and leaves the live values as they were."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rotexp.rotation.bank import RotationBank
from rotexp.sharding.communication import Communication
from rotexp.sharding.ema import ShardedEMA
from rotexp.sharding.master import ZeRO2Master
from rotexp.sharding.state_dicts import full_state, load_full_state

TRAINED = ["rotation_bank.R1", "linear.weight", "norm.weight"]
ROTATIONS = ["rotation_bank.R1"]
DECAY = 0.9


class Net(nn.Module):
    """A rotation, a linear, a norm with running statistics, and a buffer that is not persistent."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rotation_bank = RotationBank()
        self.rotation_bank.add("R1", torch.linalg.qr(torch.randn(6, 6))[0])
        self.linear = nn.Linear(6, 5, dtype=dtype)
        self.norm = nn.BatchNorm1d(5, dtype=dtype)
        self.register_buffer("scratch", torch.ones(3), persistent=False)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def ema_of(net: Net, **options: object) -> ShardedEMA:
    return ShardedEMA(net, TRAINED, decay=DECAY, rotations=ROTATIONS, communication=Communication(), **options)


@torch.no_grad()
def step(net: Net) -> None:
    """Move every parameter and buffer, the rotation to another one."""
    for parameter in (net.linear.weight, net.norm.weight, net.norm.running_mean):
        parameter.add_(0.1 * torch.randn_like(parameter))
    turn = torch.linalg.matrix_exp(0.2 * torch.randn(6, 6).triu(1) - 0.2 * torch.randn(6, 6).triu(1).mT)
    net.rotation_bank["R1"].copy_(torch.linalg.qr(turn @ net.rotation_bank["R1"])[0])
    net.norm.num_batches_tracked += 1


def values(net: Net) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trajectory_equals_the_formula_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = Net(dtype)
    ema = ema_of(net)
    names = [*TRAINED, "norm.running_mean"]
    oracle = {name: net.state_dict()[name].double().numpy().copy() for name in names}
    for _ in range(30):
        step(net)
        ema.update()
        for name in names:
            oracle[name] = DECAY * oracle[name] + (1 - DECAY) * net.state_dict()[name].double().numpy()
    state = ema.state()
    for name in names:
        assert state[name].dtype == torch.float32
        np.testing.assert_allclose(state[name].numpy(), oracle[name], rtol=0, atol=2e-6)
    assert ema.num_updates == 30


def test_buffers_that_are_not_floating_point_are_copied_and_scratch_is_left_alone(net: Net) -> None:
    ema = ema_of(net)
    for _ in range(3):
        step(net)
        ema.update()
    assert ema.state()["norm.num_batches_tracked"] == 3
    assert ema.state()["norm.num_batches_tracked"].dtype == torch.int64
    assert "scratch" not in ema.state()
    assert "linear.bias" not in ema.state(), "it is not trained"


def test_a_float64_value_has_a_float64_shadow() -> None:
    torch.manual_seed(0)
    assert ema_of(Net(torch.float64)).state()["linear.weight"].dtype == torch.float64


def test_what_is_applied_is_the_average_with_orthogonal_rotations(net: Net) -> None:
    ema = ema_of(net)
    for _ in range(5):
        step(net)
        ema.update()
    average = ema.state()["rotation_bank.R1"].double()
    assert (average @ average.mT - torch.eye(6)).abs().max() > 1e-2, "an average of rotations is none"
    left, _, right = torch.linalg.svd(average)
    with ema.applied():
        assert torch.equal(net.linear.weight, ema.state()["linear.weight"])
        assert torch.equal(net.norm.running_mean, ema.state()["norm.running_mean"])
        torch.testing.assert_close(net.rotation_bank["R1"].detach().double(), left @ right, rtol=0, atol=1e-6)
        assert torch.equal(ema.rotations()["rotation_bank.R1"], net.rotation_bank["R1"].detach())
        assert net.linear.weight.requires_grad


def forget(net: Net) -> None:
    net.rotation_bank["R1"].data.mul_(2.0)


def fail(net: Net) -> None:
    step(net)
    raise ArithmeticError("in the evaluation")


@pytest.mark.parametrize("inside", [lambda net: None, forget, fail], ids=["nothing", "changed", "exception"])
def test_live_values_come_back_bit_for_bit(net: Net, inside: Callable[[Net], None]) -> None:
    ema = ema_of(net)
    step(net)
    ema.update()
    step(net)
    before, shadows = values(net), {name: shadow.clone() for name, shadow in ema.state().items()}
    objects = dict(net.named_parameters())
    with suppress(ArithmeticError), ema.applied():
        assert not torch.equal(net.linear.weight, before["linear.weight"])
        inside(net)
    assert all(torch.equal(tensor, before[name]) for name, tensor in values(net).items())
    assert all(net.get_parameter(name) is parameter for name, parameter in objects.items())
    assert all(torch.equal(shadow, shadows[name]) for name, shadow in ema.state().items())


def test_a_negative_zero_comes_back(net: Net) -> None:
    ema = ema_of(net)
    with torch.no_grad():
        net.linear.weight[0, 0] = -0.0
        net.linear.weight[0, 1] = torch.nan
    before = net.linear.weight.detach().clone()
    with ema.applied():
        pass
    assert torch.equal(net.linear.weight.detach().view(torch.int32), before.view(torch.int32))


def test_state_is_loaded_in_place_with_its_count(net: Net) -> None:
    ema, other = ema_of(net), ema_of(net)
    for _ in range(4):
        step(net)
        ema.update()
    full = full_state(ema.state(), communication=Communication())
    load_full_state(other.state(), full, communication=Communication(), what="the average")
    assert other.num_updates == 4
    step(net)
    ema.update()
    other.update()
    assert other.num_updates == 5
    for name, shadow in ema.state().items():
        assert torch.equal(other.state()[name], shadow), name


def test_loading_names_each_fault(net: Net) -> None:
    ema = ema_of(net)
    full = full_state(ema.state(), communication=Communication())
    del full["norm.weight"]
    full["other"], full["linear.weight"] = torch.zeros(1), torch.zeros(5, 7)
    with pytest.raises(ValueError, match=r"norm\.weight is missing; other is unexpected; linear\.weight is"):
        load_full_state(ema.state(), full, communication=Communication(), what="the average")


@pytest.fixture
def master_case() -> tuple[Net, ZeRO2Master, ShardedEMA]:
    torch.manual_seed(0)
    net, communication = Net(torch.bfloat16), Communication()
    master = ZeRO2Master(net, ["linear.weight", "linear.bias"], communication=communication, bucket_mib=1)
    ema = ShardedEMA(
        net, ["rotation_bank.R1"], decay=DECAY, rotations=ROTATIONS, communication=communication, master=master
    )
    return net, master, ema


def test_the_master_is_averaged_in_float32(master_case: tuple[Net, ZeRO2Master, ShardedEMA]) -> None:
    net, master, ema = master_case
    start = master.shard.detach().clone()
    for _ in range(20):
        with torch.no_grad():
            master.shard.mul_(1 + 1e-4)  # below the resolution of the compute weights
        master.publish()
        ema.update()
    average = ema.state()["master"].tensors[0]
    oracle, value = start.double(), start.double()
    for _ in range(20):
        value = value * (1 + 1e-4)
        oracle = DECAY * oracle + (1 - DECAY) * value
    torch.testing.assert_close(average[:30].double(), oracle[:30], rtol=1e-5, atol=0)
    weight, shard = net.linear.weight.detach().clone(), master.shard.detach().clone()
    with suppress(ArithmeticError), ema.applied():
        assert torch.equal(master.shard, average)
        assert torch.equal(net.linear.weight.view(-1), average[:30].bfloat16())
        raise ArithmeticError
    assert torch.equal(master.shard, shard)
    assert torch.equal(net.linear.weight, weight)
