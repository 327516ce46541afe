"""A sharding strategy of one's own: shard as many layers as memory asks for, and gather no others.

In this folder: `python -m rotexp.train --config-dir conf plugins=[last_layers] sharding=last_layers`.
"""

from __future__ import annotations

from rotexp.errors.requirements import require
from rotexp.sharding.options import Precision, ShardingConfig
from rotexp.sharding.strategies import Sharding


class LastLayers(Sharding):
    """Splits the last `count` decoder layers over all ranks and frees each after its forward; the rest stays whole."""

    reshards_after_forward = True

    def __init__(self, *, count: int) -> None:
        require(count >= 1, "sharding.count", count, "1 or more", "use sharding=no_shard to split nothing")
        self.count = count

    def validate(self, sharding: ShardingConfig) -> None:
        """Refuse what would let split layers compute in another dtype than whole ones."""
        precision = sharding.precision
        exact = precision in (Precision.none, Precision.fp32)
        require(exact, "sharding.precision", precision.name, "none or fp32 here", "set model.dtype instead")
        dtype = sharding.param_dtype
        require(dtype is None, "sharding.param_dtype", dtype and dtype.name, "null here", "set model.dtype instead")

    def shards_unit(self, index: int | None, *, num_units: int) -> bool:
        """Return whether a unit is one of the last layers; the head comes after them."""
        head = num_units - 1
        return index is not None and head - self.count <= index < head
