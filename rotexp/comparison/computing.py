"""What of a configuration decides what a run computes, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rotexp.config.schema import RECORDING

IDLE = (*RECORDING, "profile", "plugins", "train.checkpoint_every", "evaluation.share_rows")
"""Beginnings of keys that decide nothing of it."""

SPLIT = ("strategy", "replicate", "shard", "min_shard_size", "reshard_after_forward", "bucket_mib")
PREFETCHED = ("forward_prefetch", "backward_prefetch")
SPREADING = ("sync_mode.", "launch.", *(f"sharding.{name}" for name in (*SPLIT, *PREFETCHED)))
"""Beginnings of keys that say how a run is spread over ranks, which decides no bit under `numerics=exact`."""


def is_exact(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration, by dotted keys, asks for the same bits in every world."""
    return config.get("numerics.mode") == "exact"


def deciding(config: Mapping[str, Any], *, exact: bool) -> dict[str, Any]:
    """Return the dotted keys of a configuration that decide what it computes, with their values.

    Args:
        exact: whether how it is spread over ranks does not.
    """
    idle = (*IDLE, *SPREADING) if exact else IDLE
    return {key: value for key, value in config.items() if not key.startswith(idle)}
