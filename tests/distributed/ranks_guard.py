"""What the ranks of the guard's tests do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

from rotexp.sharding import guard as guards
from rotexp.sharding.options import SyncConfig, SyncMode


class Net(nn.Module):
    """Three linears in a row, recomputed in backward if asked."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def _model(*, checkpointed: bool, reshard: bool | int) -> nn.Module:
    torch.manual_seed(0)
    model = Net(checkpointed=checkpointed)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def _step(model: nn.Module) -> list[Any]:
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    gradients = [parameter.grad.to_local().clone().numpy() for parameter in model.parameters()]
    model.zero_grad()
    return [loss.item(), gradients]


def count_all(cases: list[tuple[str, bool, bool | int]]) -> list[dict[str, Any]]:
    """Count in each case (mode, gradient checkpointing, what is resharded after forward)."""
    dist.init_process_group("gloo")
    return [_count(*case) for case in cases]


def _count(mode: str, checkpointed: bool, reshard: bool | int) -> dict[str, Any]:
    """Take one guarded step, and one unguarded step of an equal model."""
    originals = FSDPParamGroup.wait_for_unshard, FSDPParamGroup.reshard
    plain = _step(_model(checkpointed=checkpointed, reshard=reshard))
    model = _model(checkpointed=checkpointed, reshard=reshard)
    guard = guards.install(model, SyncConfig(SyncMode[mode]))
    guarded = _step(model)
    counts = guard.counts if guard else guards.GuardCounts()
    touched = FSDPParamGroup.wait_for_unshard is not originals[0]
    if guard:
        guard.remove()
    return {
        "plain": plain,
        "guarded": guarded,
        "unshards": dict(counts.unshards),
        "barriers": counts.barriers,
        "groups": guard.num_groups if guard else 0,
        "touched": touched,
        "restored": (FSDPParamGroup.wait_for_unshard, FSDPParamGroup.reshard) == originals,
    }


def nest() -> dict[str, Any]:
    """Guard in blocks that lie in one another, one of them around a model that is guarded already."""
    dist.init_process_group("gloo")
    originals = FSDPParamGroup.wait_for_unshard, FSDPParamGroup.reshard
    outer, inner = (_model(checkpointed=False, reshard=True) for _ in range(2))
    waits: dict[str, Any] = {}

    def count(name: str, model: nn.Module) -> None:
        before = guard.counts.barriers
        _step(model)
        waits[name] = guard.counts.barriers - before

    with guards.guarded(outer, "selective", states=["forward"]) as guard:
        count("alone", outer)
        with guards.guarded(inner), guards.guarded(outer, "selective", states=["pre_backward"]):
            count("both", outer)
            count("inner", inner)
        count("outer again", outer)
        count("inner after its block", inner)
        waits["groups"] = (guard.num_groups, dict(guard.groups))
    first, second = guards.guarded(outer), guards.guarded(inner)  # which end in the order they began in
    with first as guard:
        second.__enter__()
    count("the other, still open", inner)
    second.__exit__(None, None, None)
    waits["restored"] = (FSDPParamGroup.wait_for_unshard, FSDPParamGroup.reshard) == originals
    return waits


def install_twice() -> dict[str, Any]:
    """Guard two models, one of them twice in different modes, and leave a third alone."""
    dist.init_process_group("gloo")
    student, teacher, stranger = (_model(checkpointed=False, reshard=True) for _ in range(3))
    first = guards.install(student, SyncConfig(SyncMode.selective, ["forward"]))
    method = FSDPParamGroup.wait_for_unshard
    second = guards.install(student, SyncConfig(SyncMode.selective, ["pre_backward"]))
    third = guards.install(teacher, SyncConfig(SyncMode.universal), name="teacher")
    same = first is second is third and FSDPParamGroup.wait_for_unshard is method
    _step(student)
    student_counts, first.counts = first.counts, guards.GuardCounts()
    with torch.no_grad():
        teacher(torch.ones(4, 8))
    teacher_counts, first.counts = first.counts, guards.GuardCounts()
    _step(stranger)
    stranger_counts: Counter[str] = first.counts.unshards
    first.remove()
    return {
        "same": same,
        "groups": first.num_groups,
        "by name": first.groups,
        "student": (dict(student_counts.unshards), student_counts.barriers),
        "teacher": (dict(teacher_counts.unshards), teacher_counts.barriers),
        "stranger": dict(stranger_counts),
        "left": guards.installed(),
    }
