"""Apply a sharding strategy to a model on the meta device, and read back what it did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rotexp.config import ShardingConfig, Strategy


@dataclass(frozen=True)
class EffectiveSharding:
    """What a strategy did, read back from the parameters."""

    sharded: int
    replicated: int
    ignored: int
    bytes_full: int
    bytes_local: int

    def line(self) -> str:
        """Return it as one line for people."""
        ratio = self.bytes_full / max(self.bytes_local, 1)
        return (
            f"{self.sharded} parameters sharded, {self.replicated} replicated, {self.ignored} ignored; "
            f"{self.bytes_local / 2**20:.1f} of {self.bytes_full / 2**20:.1f} MiB on this rank ({ratio:.2f}x less)"
        )


def shard(
    model: nn.Module,
    config: ShardingConfig,
    *,
    units: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    device_type: str,
    world_size: int,
) -> EffectiveSharding:
    """Shard a model over all ranks by FSDP2: one unit for each of `units`, the rest in the root.

    Args:
        ignored: parameters that stay whole and outside FSDP (the rotations).

    Raises:
        RuntimeError: parameters are not split as the strategy says.
    """
    if config.strategy is Strategy.full:
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
        for unit in units:
            fully_shard(unit, **options)
        fully_shard(model, ignored_params=ignored, **options)
    effective = read_back(model, ignored=ignored)
    _check(effective, config.strategy)
    return effective


def read_back(model: nn.Module, *, ignored: set[nn.Parameter]) -> EffectiveSharding:
    """Count the model's parameters by what became of them."""
    kept = [parameter for parameter in model.parameters() if parameter not in ignored]
    sharded = [parameter for parameter in kept if isinstance(parameter, DTensor)]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in kept]
    return EffectiveSharding(
        sharded=len(sharded),
        replicated=len(kept) - len(sharded),
        ignored=len(ignored),
        bytes_full=sum(parameter.numel() * parameter.element_size() for parameter in kept),
        bytes_local=sum(parameter.numel() * parameter.element_size() for parameter in local),
    )


def _check(effective: EffectiveSharding, strategy: Strategy) -> None:
    wrong = effective.sharded if strategy is Strategy.no_shard else effective.replicated
    if wrong:
        raise RuntimeError(f"sharding={strategy.name} was asked for, but the parameters say: {effective.line()}")
