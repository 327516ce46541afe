"""What a sharding strategy is, rotexp's own, and which one a configuration names; needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from rotexp.config.targets import made
from rotexp.errors.library import refused
from rotexp.errors.requirements import require
from rotexp.sharding.options import SPECIFIC, ShardingConfig


class Strategy(Protocol):
    """Says which weights are split over which ranks; its class is called with the options beside `_target_`.

    What is split is split by rows, by FSDP2; rotations never are. Every rank asks alike and must be answered alike.

    Attributes:
        minimum_world: the smallest world in which it does something, which `launch=auto` takes on a CPU.
        takes: the fields of `sharding` that it alone knows what to do with, of `rotexp.sharding.options.SPECIFIC`.
        keeps_weights_whole: whether every rank holds all weights, outside FSDP2.
        reshards_after_forward: whether gathered weights are freed between forward and backward.
        splits_master: whether weights that are trained have a float32 master, AdamW's moments and a reduced gradient
            that are split over all ranks (`rotexp.sharding.master`); only of weights that are whole.
    """

    minimum_world: int
    takes: Collection[str]
    keeps_weights_whole: bool
    reshards_after_forward: bool
    splits_master: bool

    def validate(self, sharding: ShardingConfig) -> None:
        """Raise ValueError when it cannot go with other options of `sharding`."""

    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        """Return how many replicas there are, and over how many ranks each is split; their product is the world.

        Args:
            ranks_per_node: None where the launcher does not say.

        Raises:
            ValueError: there is none of that many ranks.
        """

    def shards_unit(self, index: int | None, *, num_units: int) -> bool:
        """Return whether the weights of a unit are split: of embeddings, each decoder layer and the head, in order.

        A weight that two units share is split if one of them is. `min_shard_size` leaves small weights whole anyway.

        Args:
            index: from 0, None of what lies outside of units, such as the last norm.
        """


class Sharding:
    """What most strategies have in common: all weights, split over all ranks."""

    minimum_world = 2
    takes: Collection[str] = ()
    keeps_weights_whole = False
    reshards_after_forward = False
    splits_master = False

    def validate(self, sharding: ShardingConfig) -> None:
        """Accept every option that it takes."""

    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:  # noqa: ARG002 (the protocol's)
        """Return one replica, split over all ranks."""
        return 1, world_size

    def shards_unit(self, index: int | None, *, num_units: int) -> bool:  # noqa: ARG002 (the protocol's)
        """Return that every unit is split."""
        return True


class NoShard(Sharding):
    """Every rank holds the whole model."""

    minimum_world = 1
    keeps_weights_whole = True

    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:  # noqa: ARG002 (the protocol's)
        """Return as many replicas as ranks."""
        return world_size, 1


class Full(Sharding):
    """FSDP2 over all ranks; gathered weights are freed after each forward."""

    takes = ("reshard_after_forward",)
    reshards_after_forward = True


class ZeRO2(Sharding):
    """FSDP2 over all ranks; gathered weights stay until the backward."""


class ZeRO2Master(NoShard):
    """Whole weights; their float32 master, AdamW's moments and gradient are split over all ranks."""

    minimum_world = 2
    takes = ("bucket_mib", "sim_world")
    splits_master = True


class HybridZeRO2(Sharding):
    """FSDP2 within groups of ranks, replicated over the groups; gathered weights stay until the backward."""

    minimum_world = 4
    takes: Collection[str] = ("replicate", "shard")

    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        """Return the sizes asked for; else groups are nodes, or two halves of one.

        Raises:
            ValueError: `replicate` times `shard` is not the number of ranks, or one of them is 1.
        """
        replicate, shard = sharding.replicate, sharding.shard
        if replicate is None and shard is None:
            several_nodes = ranks_per_node is not None and 1 < ranks_per_node < world_size
            shard = ranks_per_node if several_nodes else world_size // 2
        replicate = replicate if replicate is not None else world_size // (shard or 1)
        shard = shard if shard is not None else world_size // replicate
        if replicate * shard != world_size or min(replicate, shard) < 2:
            raise ValueError(
                f"sharding.replicate={replicate} sharding.shard={shard}: their product must be the {world_size} ranks "
                f"and each at least 2 for sharding={sharding.strategy}; change them or launch.nproc, or use "
                f"sharding=full"
            )
        return replicate, shard


class Hybrid(HybridZeRO2):
    """The same, but gathered weights are freed after each forward."""

    takes = ("replicate", "shard", "reshard_after_forward")
    reshards_after_forward = True


STRATEGIES: dict[str, type[Sharding]] = {
    "no_shard": NoShard,
    "full": Full,
    "zero2": ZeRO2,
    "zero2_master": ZeRO2Master,
    "hybrid": Hybrid,
    "hybrid_zero2": HybridZeRO2,
}
"""Those that `sharding.strategy` names by itself."""


def strategy_of(sharding: ShardingConfig) -> Strategy:
    """Return the strategy that a checked configuration names."""
    if sharding.target is None:
        return STRATEGIES[sharding.strategy]()
    own: Strategy = made(sharding, key="sharding", protocol=Strategy)
    return own


def check_strategy_options(sharding: ShardingConfig) -> None:
    """Check the strategy's name and options, and refuse options of other strategies.

    Raises:
        ValueError: there is no such strategy, it does not take an option, or its class does not work.
    """
    name, ours = sharding.strategy, ", ".join(STRATEGIES)
    if sharding.target is None:
        require(name in STRATEGIES, "sharding.strategy", name, f"one of {ours}", "choose one by sharding=NAME")
    else:
        free = f"another name than {ours} for {sharding.target}"
        require(name not in STRATEGIES, "sharding.strategy", name, free, "leave it out")
    strategy = strategy_of(sharding)
    with refused(lambda reason: f"sharding._target_={sharding.target}: does not work ({reason}); correct it"):
        takes, whole = {*strategy.takes}, strategy.keeps_weights_whole
    _refuse_options_of_others(sharding, takes)
    if whole:
        changed = sharding.changed_options() - takes
        require(not changed, "sharding", name, f"without {', '.join(sorted(changed))}", "use another sharding")
    where = f"sharding._target_={sharding.target}"
    with refused(lambda reason: f"{where}: validate does not work ({reason}); correct it", passing=(ValueError,)):
        strategy.validate(sharding)


def _refuse_options_of_others(sharding: ShardingConfig, takes: Collection[str]) -> None:
    changed = sharding.changed_options()
    for option, (allowed, remedy) in SPECIFIC.items():
        unused = option in changed and option not in takes
        require(not unused, f"sharding.{option}", getattr(sharding, option), allowed, remedy)


def mesh_sizes(sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None = None) -> tuple[int, int]:
    """Return how many replicas there are, and over how many ranks each is split.

    Args:
        ranks_per_node: where known, the hybrids shard within a node.

    Raises:
        ValueError: the strategy has no mesh of that many ranks.
    """
    strategy = strategy_of(sharding)
    replicate, shard = strategy.mesh(sharding, world_size=world_size, ranks_per_node=ranks_per_node)
    if replicate * shard != world_size or (strategy.keeps_weights_whole and shard != 1):
        raise ValueError(
            f"sharding={sharding.strategy}: its mesh of {replicate} x {shard} must be of the {world_size} ranks, and "
            f"split nothing where weights are whole; change launch.nproc, or correct {sharding.target}"
        )
    return replicate, shard
