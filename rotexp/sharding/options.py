"""The options of sharding: strategy, precision, and how unsharding is guarded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

from rotexp.config.components import Pluggable
from rotexp.errors.requirements import require


class Dtype(Enum):
    """A dtype of computation or communication; rotations are always float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Precision(Enum):
    """Presets of mixed precision: the dtype in which sharded parameters are gathered and computed with."""

    none = "none"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class SyncMode(Enum):
    """How unsharding is ordered before its consumers."""

    off = "off"
    selective = "selective"
    universal = "universal"
    event = "event"


ONE_DIMENSIONAL = ("null for a one-dimensional strategy", "use a hybrid")
NO_MASTER = ("left out where no master is split", "use sharding=zero2_master")
SPECIFIC = {
    "replicate": ONE_DIMENSIONAL,
    "shard": ONE_DIMENSIONAL,
    "reshard_after_forward": ("null here", "use sharding=full or hybrid"),
    "bucket_mib": NO_MASTER,
    "sim_world": NO_MASTER,
}
"""Options that only some strategies take; what other strategies allow, and what to do."""


@dataclass(frozen=True)
class ShardingConfig(Pluggable):
    """How parameters are split over ranks.

    Attributes:
        strategy: one of rotexp's, or what tables and W&B call one of the user's own (by itself the name of its class).
        replicate, shard: sizes of the two axes of the hybrids (None: shard within a node, replicate over nodes; on one
            node two replicas).
        min_shard_size: parameters with fewer elements stay whole on every rank.
        precision: a preset for the four fields after it; each of those overrides it.
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: as in torch's `MixedPrecisionPolicy`.
        cpu_offload: keep shards in host memory (accelerators only).
        forward_prefetch, backward_prefetch: layers gathered ahead, beside what FSDP2 does by itself.
        reshard_after_forward: size of the smaller group to which parameters are resharded after forward (None: as the
            strategy says).
        bucket_mib: size of a bucket of the ZeRO-2 master, in MiB of float32.
        sim_world: do in training what rank 0 of that many ranks would: take its share of every global batch and shard
            the master over them, in a world of one and without collectives (and the buffer, of the rotations' size, of
            one of them), to see memory and time; such a run trains a part of the weights and cannot be resumed. Tokens
            and what is made of them are those of this one rank. Held-out figures take as long as in a world of one.
    """

    strategy: str = "no_shard"
    replicate: int | None = None
    shard: int | None = None
    min_shard_size: int = 0
    precision: Precision = Precision.none
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool = True
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    reshard_after_forward: int | None = None
    bucket_mib: int = 64
    sim_world: int | None = None

    def __post_init__(self) -> None:
        if self.target is not None and self.strategy == ShardingConfig.strategy:
            object.__setattr__(self, "strategy", self.target.rpartition(".")[2])

    def changed_options(self) -> set[str]:
        """Return the names of options that have another value than by default, but for the strategy's own."""
        usual, own = ShardingConfig(), ("strategy", "_target_", "options")
        names = {option.name for option in dataclasses.fields(self) if option.name not in own}
        return {name for name in names if getattr(self, name) != getattr(usual, name)}

    def ranks(self, world_size: int) -> int:
        """Return over how many ranks a global batch and the master are split, those of a simulated world included."""
        return self.sim_world or world_size

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the strategy and the other groups say."""
        for name in ("min_shard_size", "forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            require(value >= 0, f"sharding.{name}", value, "0 or more", "0 leaves it to FSDP2")
        for name in ("replicate", "shard", "reshard_after_forward"):
            value = getattr(self, name)
            require(
                value is None or value >= 2, f"sharding.{name}", value, "at least 2 or null", "null decides by itself"
            )
        require(self.bucket_mib >= 1, "sharding.bucket_mib", self.bucket_mib, "at least 1", "the default is 64")
        world = self.sim_world
        require(
            world is None or world >= 2, "sharding.sim_world", world, "at least 2 or null", "null simulates nothing"
        )


STATES = ("forward", "pre_backward", "post_backward", "idle")
"""The training states of FSDP2, as torch names them."""


@dataclass(frozen=True)
class SyncConfig:
    """How unsharding is guarded.

    Attributes:
        mode: which unshards wait before what consumes them.
        states: the training states in which `selective` waits.
    """

    mode: SyncMode = SyncMode.off
    states: list[str] = field(default_factory=lambda: ["forward", "pre_backward"])

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        unknown = ", ".join(state for state in self.states if state not in STATES)
        require(not unknown, "sync_mode.states", unknown, f"of {', '.join(STATES)}", "name those to wait in")
