"""What the ranks of the ZeRO-2 master's tests do, and the unsharded training that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rotexp.sharding.communication import Communication
from rotexp.sharding.master import ZeRO2Master

BUCKET_MIB = 2.0**-13  # 32 numbers, so that 401 make 13 buckets, some within a parameter
NUM_BUCKETS = 13
TOKENS = torch.randint(37, (16, 5), generator=torch.Generator().manual_seed(1))
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Net(nn.Module):
    """A tied language model of 37 words whose 401 numbers no world divides; every parameter is random."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 6)
        self.inner = nn.Linear(6, 11)
        self.gain = nn.Parameter(torch.empty(1))
        self.outer = nn.Linear(11, 6, bias=False)
        self.head = nn.Linear(6, 37, bias=False)
        self.norm = nn.Parameter(torch.empty(35))
        self.head.weight = self.embedding.weight
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.to(dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.embedding(token_ids)
        hidden = hidden + self.gain * self.outer(self.inner(hidden).tanh())
        return self.head(hidden * self.norm[:6])


def mean_loss(model: nn.Module, token_ids: Tensor) -> Tensor:
    return cross_entropy(model(token_ids[:, :-1]).flatten(end_dim=1), token_ids[:, 1:].flatten())


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def start(model: nn.Module) -> tuple[ZeRO2Master, torch.optim.AdamW]:
    """Join the group, give the model a master and that an optimizer."""
    dist.init_process_group("gloo")
    communication = Communication(rank=dist.get_rank(), world_size=dist.get_world_size())
    master = ZeRO2Master(model, names(model), communication=communication, bucket_mib=BUCKET_MIB)
    return master, torch.optim.AdamW([master.shard], **ADAMW)


def backward(model: nn.Module, master: ZeRO2Master, token_ids: Tensor, *, parts: int) -> None:
    """Give every rank the gradients of its share of a global batch, in parts."""
    share = token_ids.chunk(master.communication.world_size)[master.communication.rank]
    for index, part in enumerate(share.chunk(parts)):
        (mean_loss(model, part) / parts).backward()
        if index < parts - 1:
            master.accumulate()


def values(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().clone().numpy() for name, tensor in tensors.items()}


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    return values(dict(model.named_parameters()))


def unsharded(steps: int) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """Return the weights after each step of plain AdamW on the global batch, and the squared norms in float64."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    found, norms = [], []
    for step in range(steps):
        mean_loss(model, TOKENS.roll(step, 0)[:8]).backward()
        norms.append(sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    return found, norms


def train(parts: int, steps: int) -> dict[str, Any]:
    """Train on 8 blocks a step, this rank's share in parts."""
    model = Net()
    master, optimizer = start(model)
    found, norms, collectives = [], [], []
    for step in range(steps):
        before = master.communication.num_collectives
        backward(model, master, TOKENS.roll(step, 0)[:8], parts=parts)
        master.reduce()
        kept = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        norms.append(master.squared_norm())
        optimizer.step()
        optimizer.zero_grad()
        master.publish()
        found.append(weights(model))
        collectives.append(master.communication.num_collectives - before)
    return {
        "weights": found,
        "master": values(master.full()),
        "norm_bits": [norm.numpy().tobytes() for norm in norms],
        "norms": [norm.item() for norm in norms],
        "norm_dtype": str(norms[0].dtype),
        "collectives": collectives,
        "kept": kept,
        "spills": master.num_spills,
        "moments": optimizer.state[master.shard]["exp_avg"].numel(),
    }


def exact_gradient(shape: torch.Size, *, rank: int, step: int, index: int) -> Tensor:
    """Return multiples of 1/64 below 2, which bf16 holds and whose sums over a few ranks are exact in any order.

    Their sign stays from step to step, so that weights keep moving.
    """
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    signs = 1 - 2 * (torch.arange(shape.numel()) % 2).reshape(shape)
    return signs * torch.randint(1, 128, shape, generator=generator) / 64


def has_gradient(rank: int, name: str) -> bool:
    """Say that rank 1 has none at all, and no rank one of the gain."""
    return rank != 1 and name != "gain"


def exact_unsharded(world_size: int, *, steps: int, lr: float, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Return what float32 AdamW makes of bf16 weights, given the mean over ranks of `exact_gradient`."""
    model = Net(torch.bfloat16).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW | {"lr": lr})
    for step in range(steps):
        for index, (name, parameter) in enumerate(model.named_parameters()):
            ranks = [rank for rank in range(world_size) if has_gradient(rank, name)]
            total = torch.zeros(parameter.shape)
            for rank in ranks:
                total += exact_gradient(parameter.shape, rank=rank, step=step, index=index)
            parameter.grad = (total / world_size).to(dtype)
        optimizer.step()
    return weights(model)


def train_bf16(steps: int, lr: float) -> dict[str, Any]:
    """Step bf16 weights by gradients that are given, on rank 1 by none."""
    model = Net(torch.bfloat16)
    master, _ = start(model)
    optimizer = torch.optim.AdamW([master.shard], **ADAMW | {"lr": lr})
    rank = master.communication.rank
    for step in range(steps):
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if has_gradient(rank, name):
                gradient = exact_gradient(parameter.shape, rank=rank, step=step, index=index)
                parameter.grad = gradient.to(torch.bfloat16)
        master.reduce()
        optimizer.step()
        before = master.communication.num_bytes
        master.publish()
    published = master.communication.num_bytes - before
    pieces = master.pieces(master.shard)
    return {
        "weights": weights(model),
        "master": values(master.full()),
        "moment": values(master.full(optimizer.state[master.shard]["exp_avg"])),
        "bytes_published": published,
        "size": pieces.size,
        "pieces": [(offset, piece.numpy()) for offset, piece in zip(pieces.offsets, pieces.tensors, strict=True)],
    }


def drop_a_step_and_load() -> dict[str, Any]:
    """Discard a step between its parts and another after its reduction, step; load other weights, rebuild."""
    model = Net()
    master, optimizer = start(model)
    backward(model, master, TOKENS[:8] % 7, parts=2)
    master.discard()
    backward(model, master, TOKENS[:8] % 7, parts=1)
    master.reduce()
    master.discard()
    left = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    backward(model, master, TOKENS[:8], parts=1)
    master.reduce()
    optimizer.step()
    master.publish()
    stepped = weights(model)
    loaded = Net(seed=5)
    for module in ("inner", "outer"):
        setattr(model, module, getattr(loaded, module))  # others may replace objects
    model.load_state_dict(loaded.state_dict())
    master.rebuild()
    rebuilt = values(master.full())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    master.publish()
    return {"left": left, "stepped": stepped, "rebuilt": rebuilt, "published": weights(model)}


@torch.no_grad()
def change_rank_zero_alone() -> dict[str, Any]:
    """Load other weights on rank 0, and change one number of another rank's; rebuild."""
    model = Net()
    master, _ = start(model)
    if master.communication.rank == 0:
        model.load_state_dict(Net(seed=5).state_dict())
    else:
        model.norm[3] = 7.0
    master.rebuild()
    rebuilt, held = values(master.full()), weights(model)
    before = master.communication.num_collectives
    master.rebuild()
    collectives = master.communication.num_collectives - before
    master.publish()
    return {"rebuilt": rebuilt, "held": held, "published": weights(model), "collectives": collectives}
