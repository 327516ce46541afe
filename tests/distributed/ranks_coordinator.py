"""What the ranks of the coordinator's tests do."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks_experiment import compose, run_experiments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rotexp.metrics.options import OnDivergence
from rotexp.rotation.bank import RotationBank
from rotexp.sharding.communication import Communication
from rotexp.sharding.ema import ShardedEMA
from rotexp.sharding.local_rows import local_rows
from rotexp.sharding.master import ZeRO2Master
from rotexp.training.coordinator import Coordinator
from rotexp.training.optimizers import Optimizers


class Net(nn.Module):
    """Two linears, the first without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=False)
        self.last = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def _open(*, identical: bool = True) -> tuple[nn.Module, RotationBank, Communication]:
    """Join the group; return a model with a bank of three rotations and two linears of fixed weights."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0 if identical else rank)
    model = Net()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    bank = RotationBank()
    for name in ("R1", "R2_0", "R2_1"):
        bank.add(name, torch.linalg.qr(torch.randn(6, 6, generator=generator))[0])
    model.rotation_bank = bank
    return model, bank, Communication(rank=rank, world_size=dist.get_world_size())


def consolidate() -> dict[str, Any]:
    """Give rotation R1 and a bias a gradient everywhere, R2_0 one on rank 1 only, R2_1 none; consolidate."""
    model, bank, communication = _open()
    rank = communication.rank
    bank["R1"].grad = torch.full((6, 6), float(rank + 1))
    bank["R2_0"].grad = torch.ones(6, 6) if rank == 1 else None
    model.last.bias.grad = torch.full((6,), float(rank))
    before = communication.num_collectives
    numbers = Coordinator(model, communication).consolidate(torch.tensor([float(rank), 1.0 + 2.0 * rank]))
    return {
        "numbers": numbers.tolist(),
        "bias": model.last.bias.grad.numpy(),
        "R1": bank["R1"].grad.numpy(),
        "R2_0": None if bank["R2_0"].grad is None else bank["R2_0"].grad.numpy(),
        "R2_1": bank["R2_1"].grad,
        "collectives": communication.num_collectives - before,
    }


def broadcast() -> dict[str, Any]:
    """Draw other rotations on every rank, and broadcast."""
    model, bank, communication = _open(identical=False)
    coordinator = Coordinator(model, communication)
    before = communication.num_collectives
    apart = coordinator.divergence()
    between = communication.num_collectives
    coordinator.broadcast()
    return {
        "apart": (apart.max_abs_diff, apart.names, apart.ranks),
        "broadcasts": communication.num_collectives - between,
        "digests": between - before,
        "after": coordinator.divergence().max_abs_diff,
        "R2_1": bank["R2_1"].detach().numpy(),
    }


def plant_one_bit(policy: str) -> dict[str, Any]:
    """Flip the lowest bit of one number of one rotation on the last rank, and look."""
    model, bank, communication = _open()
    coordinator = Coordinator(model, communication)
    quiet_before = communication.num_collectives
    quiet = coordinator.divergence()
    quiet_collectives = communication.num_collectives - quiet_before
    if communication.rank == communication.world_size - 1:
        bits = bank["R2_0"].detach().view(torch.int32)
        bits[3, 2] ^= 1
    found = coordinator.divergence()
    raised = ""
    try:
        coordinator.settle(found, OnDivergence[policy], step=7)
    except ArithmeticError as error:
        raised = str(error)
    return {
        "quiet": (quiet.max_abs_diff, quiet.names, quiet_collectives),
        "found": (found.max_abs_diff, found.names, found.ranks),
        "raised": raised,
        "after": coordinator.divergence().max_abs_diff,
    }


def clip(replicate: int, max_norm: float) -> dict[str, Any]:
    """Clip gradients of sharded weights (two-dimensional if `replicate` > 1), whole ones, and rotations."""
    model, bank, communication = _open()
    if communication.world_size > 1:
        sizes = (replicate, communication.world_size // replicate)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if replicate > 1 else mesh["shard"]
        whole = set(bank.parameters()) | {model.last.bias}
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=whole)
    x = torch.arange(12.0).reshape(2, 6) / 6
    (model(x @ bank["R1"]).square().sum() + bank["R2_1"].sum()).backward()
    norms = Coordinator(model, communication).clip(max_norm)
    return {
        "norms": (norms.total.item(), norms.rotations.item(), norms.weights.item()),
        "R1": bank["R1"].grad.numpy(),
        "bias": model.last.bias.grad.numpy(),
        "rows": local_rows(model.first.weight.grad).numpy(),
    }


def find_nonfinite(max_norm: float | None) -> dict[str, Any]:
    """Spoil one number of one whole and of one sharded gradient on the last rank alone; clip, and look for it."""
    model, bank, communication = _open()
    last = communication.rank == communication.world_size - 1
    mesh = init_device_mesh("cpu", (communication.world_size,))
    whole = set(bank.parameters()) | {model.last.bias}
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    coordinator = Coordinator(model, communication)
    found = {}
    for name in ("", "last.bias", "first.weight", "rotation_bank.R2_1"):
        model.zero_grad()
        (model(torch.ones(2, 6) @ bank["R1"]).square().sum() + bank["R2_1"].sum()).backward()
        if name and last:
            local_rows(model.get_parameter(name).grad).view(-1)[0] = torch.nan
        coordinator.consolidate(torch.zeros(1))
        norms = coordinator.clip(max_norm)
        found[name] = (coordinator.nonfinite(), bool(norms.total.isfinite()))
    return found


def find_nonfinite_in_master() -> tuple[str | None, list[float]]:
    """Give the second of two mastered weights one gradient that is infinite, on the last rank alone."""
    model, _, communication = _open()
    names = ["first.weight", "last.weight"]
    master = ZeRO2Master(model, names, communication=communication, bucket_mib=2.0**-16)
    coordinator = Coordinator(model, communication, master=master)
    for name in names:
        model.get_parameter(name).grad = torch.ones_like(model.get_parameter(name))
    if communication.rank == communication.world_size - 1:
        model.get_parameter("last.weight").grad[5, 9] = torch.inf
    model.last.bias.requires_grad_(False)
    coordinator.consolidate(torch.zeros(1))
    norms = coordinator.clip(1.0)
    return coordinator.nonfinite(), [norms.total.item(), norms.weights.item()]


@torch.no_grad()
def plant_in_what_ranks_hold(replicate: int) -> dict[str, Any]:
    """Spoil, on the last rank, one thing after another of what is trained; look, and repair.

    The first linear is sharded, over the last axis of a mesh of two if `replicate` > 1; all else is whole.
    """
    model, bank, communication = _open()
    mesh = init_device_mesh("cpu", (communication.world_size,), mesh_dim_names=("shard",))
    if replicate > 1:
        sizes = (replicate, communication.world_size // replicate)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    fully_shard(model.first, mesh=mesh)
    weights = {name: p for name, p in model.named_parameters() if not name.startswith("rotation_bank")}
    model.last.weight.requires_grad_(False)
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    optimizers = Optimizers({}, trained, compose([]))
    ema = ShardedEMA(model, [*trained], decay=0.9, rotations=(), communication=communication)
    coordinator = Coordinator(model, communication, optimizers=optimizers, ema=ema)
    moments = {name: moment for name, moment in optimizers.tensors().items() if name.endswith("exp_avg")}
    last = communication.rank == communication.world_size - 1

    def spoil(*changes: tuple[Tensor, float]) -> dict[str, Any]:
        before = {name: local_rows(weight).clone() for name, weight in [*weights.items(), ("R1", bank["R1"])]}
        for tensor, change in changes if last else ():
            local_rows(tensor).view(-1)[1] += change
        found = coordinator.divergence()
        every = coordinator.divergence(frozen=True)
        repaired = coordinator.settle(every, OnDivergence["rebroadcast"], step=7)
        after = {name: local_rows(weight) for name, weight in [*weights.items(), ("R1", bank["R1"])]}
        return {
            "found": (dict(found.differences), found.ranks, found.max_abs_diff),
            "every": dict(every.differences),
            "repaired": repaired,
            "restored": all(torch.equal(after[name], values) for name, values in before.items()),
        }

    bias, sharded = model.last.bias, weights["first.weight"]
    moved = (moments["last.bias/exp_avg"], ema.state()["last.bias"])
    if last:
        for tensor in moved:
            local_rows(tensor).view(-1)[1] = 5.0
    return {
        "nothing": spoil(),
        "a weight": spoil((bias, 0.25)),
        "a weight and a rotation": spoil((bias, 0.25), (bank["R1"], -0.5)),
        "a frozen weight": spoil((model.last.weight, 0.125)),
        "no number": spoil((bias, torch.nan)),
        "beside": [local_rows(tensor).view(-1)[1].item() for tensor in moved],
        "a shard": spoil((sharded, 2.0)),
    }


@torch.no_grad()
def spoil_the_masters() -> dict[str, Any]:
    """Change a compute weight on rank 0 alone: the master knows what it was."""
    model, _, communication = _open()
    names = ["first.weight", "last.weight"]
    master = ZeRO2Master(model, names, communication=communication, bucket_mib=2.0**-16)
    coordinator = Coordinator(model, communication, master=master)
    before = model.first.weight.clone()
    if communication.rank == 0:
        model.first.weight[1, 2] += 0.25
    found = coordinator.divergence()
    coordinator.settle(found, OnDivergence["rebroadcast"], step=1)
    return {
        "found": (dict(found.differences), found.ranks),
        "restored": torch.equal(model.first.weight, before),
        "after": coordinator.divergence().names,
    }


def spoil_a_run(policy: str, folder: str) -> dict[str, Any]:
    """Train everything at defaults, and add 0.25 to a weight on rank 1 in the second step."""
    from rotexp.tracking.phases import PhaseError
    from rotexp.training.state import TrainingState

    advance = TrainingState.advance

    def spoiled(state: TrainingState, loss: float) -> None:
        advance(state, loss)
        if state.step == 2 and dist.get_rank() == 1:
            state.model.network.get_parameter(SPOILED).detach()[3, 4] += 0.25

    overrides = ["model=random_llama", "train.params=all", "optimizer.lr=0.1", "metrics.divergence_every=1"]
    with mock.patch.object(TrainingState, "advance", spoiled):
        try:
            return run_experiments({policy: [*overrides, f"metrics.on_divergence={policy}"]}, folder)[policy]
        except PhaseError as error:
            return {"error": str(error)}


SPOILED = "model.layers.0.self_attn.q_proj.weight"
