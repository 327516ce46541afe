"""What the ranks of the state's tests do: hold known numbers in shards, save, load, gather and average them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import numpy as np
import torch
import torch.distributed as dist
from damaged import RUN_FACTS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rotexp.rotation.bank import RotationBank
from rotexp.runfolder.checkpoint_folders import find_checkpoint
from rotexp.sharding import state_dicts
from rotexp.sharding.communication import Communication
from rotexp.sharding.ema import ShardedEMA
from rotexp.sharding.local_rows import local_rows, reshard
from rotexp.sharding.master import ZeRO2Master
from rotexp.sharding.split_vector import SplitVector
from rotexp.sharding.state_dicts import full_state, load_full_state
from rotexp.training.saved_state import Checkpoints, load, restore_random_states

SHAPES = {
    "embedding": (37, 5),
    "small": (3, 2),
    "hybrid": (37, 3),
    "hybrid_small": (1,),
    "rotation": (4, 4),
    "master": (53,),
    "replicated_pieces": (9,),
}
DECAY = 0.8


def number(name: str) -> Tensor:
    """Return the known values of a name, with a negative zero, and a NaN where only the bits count."""
    seed = sorted(SHAPES).index(name)
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    values.view(-1)[0] = -0.0
    return values.to(torch.bfloat16) if name == "hybrid" else values


def join() -> Communication:
    dist.init_process_group("gloo") if int(os.environ["WORLD_SIZE"]) > 1 else None
    return Communication(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def held(communication: Communication, fill: Callable[[str], Tensor]) -> dict[str, Tensor | SplitVector]:
    """Return the state that holds `fill(name)`, each name sharded in its own way."""
    world, rank = communication.world_size, communication.rank
    line, grid = (_mesh(world), _mesh(2, world // 2)) if world > 1 else (None, None)
    bucket = 4 * world + (world == 2) * 2
    owned = [
        slice(start + rank * (bucket // world), start + (rank + 1) * (bucket // world))
        for start in range(0, 53, bucket)
    ]
    master = fill("master")
    cuts = [(piece.start, master[piece]) for piece in owned if piece.start < 53]
    return {
        "embedding": _distributed(fill("embedding"), line, [Shard(0)]),
        "small": _distributed(fill("small"), line, [Shard(0)]),
        "hybrid": _distributed(fill("hybrid"), grid, [Replicate(), Shard(0)]),
        "hybrid_small": _distributed(fill("hybrid_small"), grid, [Replicate(), Shard(0)]),
        "rotation": fill("rotation"),
        "master": SplitVector(53, [start for start, _ in cuts], [tensor for _, tensor in cuts]),
        "replicated_pieces": SplitVector(9, [0], [fill("replicated_pieces")]),
    }


def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes)


def _distributed(values: Tensor, mesh: DeviceMesh | None, placements: list[Any]) -> Tensor:
    return values if mesh is None else distribute_tensor(values, mesh, placements)


def _blank(name: str) -> Tensor:
    return torch.full_like(number(name), 99.0)


def _bits(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in tensors.items()}


def known_bits() -> dict[str, np.ndarray]:
    return _bits({name: number(name) for name in SHAPES})


def save(folder: str, asynchronous: bool) -> dict[str, Any]:
    """Save the known numbers; change them as soon as the call returns; draw what the random states then give."""
    communication = join()
    state = held(communication, number)
    checkpoints = Checkpoints(Path(folder), keep=2, asynchronous=asynchronous, communication=communication)
    torch.manual_seed(10 + communication.rank)
    saved = checkpoints.save(3, state, facts={"epoch": 2})
    drawn = torch.rand(3).numpy()
    for value in state.values():
        for tensor in value.tensors if isinstance(value, SplitVector) else [local_rows(value)]:
            tensor.zero_()
    path = saved or checkpoints.wait()
    return {"path": str(path), "drawn": drawn, "files": sorted(file.name for file in path.iterdir())}


def read(path: str) -> dict[str, Any]:
    """Load into another state and gather it; spread that into a third; return both, and what the random states give."""
    communication = join()
    state = held(communication, _blank)
    facts = load(Path(path), state, communication=communication)
    state_dicts.WINDOW = 7
    full = full_state(state, communication=communication)
    spread = held(communication, _blank)
    load_full_state(spread, full, communication=communication, what="x")
    restored = restore_random_states(Path(path), communication=communication)
    return {
        "loaded": _bits(full),
        "spread": _bits(full_state(spread, communication=communication)),
        "facts": facts,
        "restored": restored,
        "drawn": torch.rand(3).numpy(),
    }


def faults(path: str) -> dict[str, str]:
    """Load, in both ways, into a state that does not fit; and what only rank 0 knows to be spoiled."""
    communication = join()
    state = held(communication, _blank)
    state["extra"], state["small"] = torch.zeros(2), torch.zeros(3, 3)
    del state["rotation"]
    full = {name: number(name) for name in SHAPES} if communication.rank == 0 else {}
    texts = {
        "sharded": _message(lambda: load(Path(path), state, communication=communication)),
        "full": _message(lambda: load_full_state(state, full, communication=communication, what="the average")),
    }
    texts["untouched"] = str(all((local_rows(state[name]) == 99).all().item() for name in ("embedding", "hybrid")))
    file = next(Path(path).glob("__1_*.distcp"))
    dist.barrier()
    if communication.rank == 0:
        os.truncate(file, 10)
    dist.barrier()
    fitting = held(communication, _blank)
    return texts | {"truncated": _message(lambda: load(Path(path), fitting, communication=communication))}


def _message(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def full_disk(folder: str) -> list[dict[str, Any]]:
    """Save; save with the disk of the last rank full; save again: for every place that may fail, at once and later."""
    communication = join()
    places = ("torch.distributed.checkpoint.filesystem._write_item", "torch.save")
    cases = [(place, asynchronous) for place in places for asynchronous in (False, True)]
    return [_full_disk(Path(folder) / str(n), *case, communication) for n, case in enumerate(cases)]


def _full_disk(folder: Path, place: str, asynchronous: bool, communication: Communication) -> dict[str, Any]:
    checkpoints = Checkpoints(folder, keep=5, asynchronous=asynchronous, communication=communication)
    state = held(communication, number)

    def saving(step: int) -> None:
        checkpoints.save(step, state, facts=RUN_FACTS)
        checkpoints.wait()

    def listed() -> list[str]:
        dist.barrier()
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        dist.barrier()
        return names

    saving(1)
    before = listed()
    last = communication.rank == communication.world_size - 1
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch(place, side_effect=full) if last else nullcontext():
        message = _message(lambda: saving(2))
    after = listed()
    saving(3)
    found = find_checkpoint(folder)
    return {"message": message, "before": before, "after": after, "found": found.path.name, "skipped": found.skipped}


class Net(nn.Module):
    """A rotation outside FSDP; an embedding of 37 words, and a bias and a gain smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.rotation_bank = RotationBank()
        self.rotation_bank.add("R1", torch.linalg.qr(torch.randn(6, 6, generator=generator))[0])
        self.embedding = nn.Embedding(37, 6)
        self.inner = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.empty(1))
        for parameter in (*self.embedding.parameters(), *self.inner.parameters(), self.gain):
            nn.init.normal_(parameter, generator=generator)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.inner(self.embedding(token_ids) @ self.rotation_bank["R1"]) * self.gain


def _sharded_net(communication: Communication) -> tuple[Net, ShardedEMA]:
    net = Net()
    if communication.world_size > 1:
        mesh = _mesh(communication.world_size)
        ignored = set(net.rotation_bank.parameters())
        fully_shard(net.inner, mesh=mesh, ignored_params=ignored)
        fully_shard(net, mesh=mesh, ignored_params=ignored)
    names = [name for name, _ in net.named_parameters()]
    ema = ShardedEMA(net, names, decay=DECAY, rotations=["rotation_bank.R1"], communication=communication)
    return net, ema


@torch.no_grad()
def _move(net: Net, step: int) -> None:
    """Change every parameter by numbers that do not depend on the world."""
    reshard(net)
    for index, (_, parameter) in enumerate(sorted(net.named_parameters())):
        generator = torch.Generator().manual_seed(100 * step + index)
        change = torch.randn(parameter.shape, generator=generator) / 10
        if isinstance(parameter, DTensor):
            change = distribute_tensor(change, parameter.device_mesh, parameter.placements)
        local_rows(parameter).add_(local_rows(change))


def average(folder: str) -> dict[str, Any]:
    """Average five steps, with evaluations in between; use the average; save it."""
    communication = join()
    net, ema = _sharded_net(communication)
    token_ids = torch.arange(37)
    before = communication.num_collectives
    for step in range(5):
        _move(net, step)
        with torch.no_grad():
            net(token_ids)  # leaves the root unsharded
        with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("a collective")):
            ema.update()
    collectives = communication.num_collectives - before
    live = {name: local_rows(parameter).clone() for name, parameter in _shards(net).items()}
    with torch.no_grad():
        output_before = net(token_ids).clone()
    with suppress(ArithmeticError), ema.applied():
        with torch.no_grad():
            averaged_output = net(token_ids).clone()
        raise ArithmeticError
    restored = all(torch.equal(local_rows(parameter), live[name]) for name, parameter in _shards(net).items())
    with torch.no_grad():
        same = torch.equal(net(token_ids), output_before)
    full = full_state(ema.state(), communication=communication)
    saving = Checkpoints(Path(folder), keep=1, asynchronous=False, communication=communication)
    return {
        "collectives": collectives,
        "local_numbers": sum(local_rows(shadow).numel() for shadow in ema.state().values()),
        "restored": restored and same,
        "output": averaged_output.numpy(),
        "live_output": output_before.numpy(),
        "average": {name: tensor.numpy() for name, tensor in full.items()},
        "path": str(saving.save(5, ema.state(), facts={})),
    }


def _shards(net: Net) -> dict[str, Tensor]:
    reshard(net)
    return dict(net.named_parameters())


def load_average(path: str) -> dict[str, Any]:
    """Load an average that another world saved; use it."""
    communication = join()
    net, ema = _sharded_net(communication)
    load(Path(path), ema.state(), communication=communication)
    with ema.applied(), torch.no_grad():
        output = net(torch.arange(37)).clone()
    full = full_state(ema.state(), communication=communication)
    return {
        "num_updates": ema.num_updates,
        "output": output.numpy(),
        "average": {name: tensor.numpy() for name, tensor in full.items()},
    }


def _mastered(communication: Communication) -> tuple[Net, ZeRO2Master, ShardedEMA]:
    net = Net()
    net.embedding.to(torch.bfloat16)
    names = ["embedding.weight", "inner.weight", "inner.bias", "gain"]
    master = ZeRO2Master(net, names, communication=communication, bucket_mib=2.0**-13)
    rotations = ["rotation_bank.R1"]
    ema = ShardedEMA(net, rotations, decay=DECAY, rotations=rotations, communication=communication, master=master)
    return net, master, ema


def average_master(folder: str) -> dict[str, Any]:
    """Average a master that three steps double; use the average and leave it by an exception of one rank alone."""
    communication = join()
    net, master, ema = _mastered(communication)
    start = master.full()
    for _ in range(3):
        with torch.no_grad():
            master.shard.mul_(2.0)
        master.publish()
        ema.update()
    weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    shard = master.shard.detach().clone()
    with suppress(ArithmeticError), ema.applied():
        applied = net.embedding.weight.detach().float().numpy()
        if communication.rank == communication.world_size - 1:
            raise ArithmeticError
    restored = all(torch.equal(parameter, weights[name]) for name, parameter in net.named_parameters())
    saving = Checkpoints(Path(folder), keep=1, asynchronous=False, communication=communication)
    average = full_state(ema.state(), communication=communication)
    return {
        "start": {name: tensor.numpy() for name, tensor in start.items()},
        "average": average["master"].numpy() if average else None,
        "applied": applied,
        "restored": restored and torch.equal(master.shard, shard),
        "path": str(saving.save(3, ema.state(), facts={})),
    }


def load_master_average(path: str) -> dict[str, Any]:
    """Load the average of a master that another world saved."""
    communication = join()
    net, _, ema = _mastered(communication)
    load(Path(path), ema.state(), communication=communication)
    with ema.applied():
        applied = net.embedding.weight.detach().float().numpy()
    return {"applied": applied, "num_updates": ema.num_updates}
