"""Apply a sharding strategy to a model on the meta device, and read back what it did."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from rotexp.sharding.options import Dtype, Precision, ShardingConfig
from rotexp.sharding.strategies import mesh_sizes, strategy_of

PRESETS = {
    Precision.none: (None, None, None),
    Precision.fp32: (torch.float32, torch.float32, torch.float32),
    Precision.bf16: (torch.bfloat16, torch.float32, None),
    Precision.fp16: (torch.float16, torch.float32, None),
}
"""Parameter, reduction and output dtype of each preset; None leaves them as they are."""


@dataclass(frozen=True)
class EffectiveSharding:
    """What a strategy did, read back from the parameters.

    Attributes:
        sharded, replicated, ignored: counts of parameters; the ignored ones are the rotations.
        bytes_full, bytes_local: of the model, and of what this rank holds of it, rotations left out.
        mesh: sizes of the mesh the shards lie on, empty when there are none.
    """

    sharded: int
    replicated: int
    ignored: int
    bytes_full: int
    bytes_local: int
    mesh: tuple[int, ...]

    @property
    def reduction(self) -> float:
        """How many times less a rank holds than the whole model."""
        return self.bytes_full / max(self.bytes_local, 1)

    def line(self) -> str:
        """Return it as one line for people."""
        mesh = f" over {' x '.join(map(str, self.mesh))} ranks" if self.mesh else ""
        return (
            f"{self.sharded} parameters sharded{mesh}, {self.replicated} replicated, {self.ignored} ignored; "
            f"{self.bytes_local / 2**20:.1f} of {self.bytes_full / 2**20:.1f} MiB on this rank "
            f"({self.reduction:.2f}x less)"
        )


def shard(
    model: nn.Module,
    config: ShardingConfig,
    *,
    units: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    device_type: str,
    world_size: int,
    ranks_per_node: int | None = None,
    frozen: bool = False,
) -> EffectiveSharding:
    """Shard a model by FSDP2: one unit for each of `units` that the strategy splits, the rest in the root.

    Args:
        ignored: parameters that stay whole and outside FSDP (the rotations).
        frozen: whether no backward follows, for which gathered weights would wait.

    Raises:
        ValueError: CPU offload is asked for where there is no accelerator to offload from.
        RuntimeError: parameters are not split as the strategy says.
    """
    # It warns of in-place operations on what a unit returns; there are none on the way to a causal model's logits.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    strategy = strategy_of(config)
    if not strategy.keeps_weights_whole:
        sizes = mesh_sizes(config, world_size=world_size, ranks_per_node=ranks_per_node)
        options: dict[str, Any] = {
            "mesh": build_mesh(sizes, device_type=device_type),
            "reshard_after_forward": config.reshard_after_forward or frozen or strategy.reshards_after_forward,
            "mp_policy": precision_policy(config),
            "offload_policy": _offload_policy(config, device_type=device_type),
            "ignored_params": ignored | (set(model.parameters()) - split_parameters(model, units, config)),
        }
        split = [unit for index, unit in enumerate(units) if strategy.shards_unit(index, num_units=len(units))]
        for unit in _with_tied(split):
            fully_shard(unit, **options)
        fully_shard(model, **options)
        _prefetch(split, config)
    effective = read_back(model, ignored=ignored)
    check_effective(model, config, units=units, ignored=ignored, world_size=world_size, ranks_per_node=ranks_per_node)
    return effective


def split_parameters(model: nn.Module, units: Sequence[nn.Module], config: ShardingConfig) -> set[nn.Parameter]:
    """Return the parameters whose rows are shared out, unless they are ignored; the model may be sharded or not."""
    strategy = strategy_of(config)
    if strategy.keeps_weights_whole:
        return set()
    inside = {parameter for unit in units for parameter in unit.parameters()}
    split = set(model.parameters()) - inside if strategy.shards_unit(None, num_units=len(units)) else set()
    for index, unit in enumerate(units):
        if strategy.shards_unit(index, num_units=len(units)):
            split |= set(unit.parameters())
    return {parameter for parameter in split if parameter.numel() >= config.min_shard_size}


def build_mesh(sizes: tuple[int, int], *, device_type: str) -> DeviceMesh:
    """Return the mesh of a number of replicas, each split over as many ranks: `replicate` by `shard`, or `shard`."""
    if sizes[0] > 1:
        return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, sizes[1:], mesh_dim_names=("shard",))


def precision_policy(config: ShardingConfig) -> MixedPrecisionPolicy:
    """Return the preset of mixed precision with the fields that were set explicitly."""

    def chosen(explicit: Dtype | None, preset: torch.dtype | None) -> torch.dtype | None:
        return preset if explicit is None else getattr(torch, explicit.name)

    param, reduce, output = PRESETS[config.precision]
    return MixedPrecisionPolicy(
        param_dtype=chosen(config.param_dtype, param),
        reduce_dtype=chosen(config.reduce_dtype, reduce),
        output_dtype=chosen(config.output_dtype, output),
        cast_forward_inputs=config.cast_forward_inputs,
    )


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
        mesh=tuple(sharded[0].device_mesh.shape) if sharded else (),
    )


def check_effective(
    model: nn.Module,
    config: ShardingConfig,
    *,
    units: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    world_size: int,
    ranks_per_node: int | None = None,
) -> None:
    """Compare what the parameters say with what was asked for.

    Raises:
        RuntimeError: a parameter is whole that should be split, split that should be whole, or split otherwise.
    """
    replicate, shards = mesh_sizes(config, world_size=world_size, ranks_per_node=ranks_per_node)
    mesh = (replicate, shards) if replicate > 1 else (shards,)
    wanted = split_parameters(model, units, config) - ignored
    for name, parameter in model.named_parameters():
        split = isinstance(parameter, DTensor)
        if split != (parameter in wanted):
            state = "sharded" if split else "whole"
            raise RuntimeError(f"sharding={config.strategy}: {name} is {state}, which was not asked for")
        if isinstance(parameter, DTensor):
            found = tuple(parameter.device_mesh.shape), parameter.placements[-1]
            if found != (mesh, Shard(0)):
                raise RuntimeError(f"sharding={config.strategy}: {name} lies on {found}, not on {mesh} by rows")


def _offload_policy(config: ShardingConfig, *, device_type: str) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    if device_type == "cpu":
        raise ValueError("sharding.cpu_offload=true: must be false on a machine without accelerators; leave it out")
    return CPUOffloadPolicy()


def _with_tied(units: Sequence[nn.Module]) -> list[nn.Module | list[nn.Module]]:
    """Put units that share a parameter (a tied embedding and head) into one."""
    groups: list[list[nn.Module]] = []
    for unit in units:
        own = set(unit.parameters())
        sharing = next((group for group in groups if own & set(group[0].parameters())), None)
        if sharing is None:
            groups.append([unit])
        else:
            sharing.append(unit)
    return [group[0] if len(group) == 1 else group for group in groups]


def _prefetch(units: Sequence[nn.Module], config: ShardingConfig) -> None:
    """Chain what is gathered ahead; of units that were put into one, the first counts forward, the last backward."""
    chain: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    if config.forward_prefetch:
        for index, unit in reversed([*enumerate(chain)]):
            unit.set_modules_to_forward_prefetch(chain[index + 1 : index + 1 + config.forward_prefetch])
    if config.backward_prefetch:
        for index, unit in enumerate(chain):
            first = max(0, index - config.backward_prefetch)
            unit.set_modules_to_backward_prefetch(chain[first:index][::-1])
