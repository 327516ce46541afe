"""`rotexp.testing.check_strategy` takes rotexp's strategies and the example, and finds what is wrong with others."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from rotexp.sharding.options import ShardingConfig
from rotexp.sharding.strategies import STRATEGIES, NoShard, Sharding
from rotexp.testing import check_strategy
from rotexp.testing import strategies as checks

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "last_layers"


class WithoutMinimum(Sharding):
    minimum_world: Any = None


class NoMinimum(Sharding):
    minimum_world = 0


class SaysMaybe(Sharding):
    reshards_after_forward: Any = "layers"


class TakesWhatIsNotThere(Sharding):
    takes = ("precision",)


class SplitsAMasterOfShards(Sharding):
    splits_master = True


class AnswersByCount(Sharding):
    asked = count()

    def shards_unit(self, index: int | None, *, num_units: int) -> bool:
        return next(self.asked) % 2 == 0


class AnswersInWords(Sharding):
    def shards_unit(self, index: int | None, *, num_units: int) -> Any:
        return "yes"


class NeedsMoreThanItSays(Sharding):
    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        return 2, world_size // 2 if world_size > 2 else 2


class LeavesRanksOut(Sharding):
    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        return 1, min(world_size, 4)


class NeedsTheNode(Sharding):
    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        return world_size // ranks_per_node, ranks_per_node  # type: ignore[operator, return-value]


class WholeButSplit(NoShard):
    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        return 1, world_size


class SplitsNothing(Sharding):
    def shards_unit(self, index: int | None, *, num_units: int) -> bool:
        return False


class SplitsByRank(Sharding):
    """Keeps the head whole on all ranks but the first."""

    def shards_unit(self, index: int | None, *, num_units: int) -> bool:
        return index != num_units - 1 or not dist.is_initialized() or dist.get_rank() == 0


class MeshByRank(Sharding):
    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        last = dist.is_initialized() and dist.get_rank() == world_size - 1
        return (2, world_size // 2) if last else (1, world_size)


class LooksUpAWorld(Sharding):
    def mesh(self, sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None) -> tuple[int, int]:
        return {2: (1, 2)}[world_size]


class RefusesItself(Sharding):
    def validate(self, sharding: ShardingConfig) -> None:
        raise ValueError("sharding.strategy: never")


BROKEN = {
    WithoutMinimum: "minimum_world=None: must be a whole number",
    NoMinimum: "minimum_world=0: must be 1 or more",
    SaysMaybe: "reshards_after_forward='layers': must be True or False",
    TakesWhatIsNotThere: "takes={'precision'}: must be of replicate, ",
    SplitsAMasterOfShards: "splits_master=True: the master is of weights that are whole",
    AnswersByCount: r"shards_unit\(None\): is True and then False",
    AnswersInWords: r"shards_unit\(None\)='yes': must be True or False",
    NeedsMoreThanItSays: r"minimum_world=2: raised ValueError: .*its mesh of 2 x 2 must be of the 2 ranks",
    LeavesRanksOut: r"mesh in a world of 8, None on a node: raised ValueError: .* mesh of 1 x 4 must be of the 8 ranks",
    NeedsTheNode: "minimum_world=2: raised TypeError: ",
    WholeButSplit: r"mesh in a world of 2, .*: its mesh of 1 x 2 must .*split nothing where weights are whole",
    SplitsNothing: "nothing is split in a world of 2",
    SplitsByRank: r"lm_head.weight: is split by the first or the last of 2 ranks alone",
    MeshByRank: r"mesh=\(2,\) on the first of 2 ranks, \(2, 1\) on the last",
    LooksUpAWorld: r"mesh in a world of 4, None on a node: raised KeyError: 4",
    RefusesItself: r"RefusesItself\(\): raised ValueError: sharding.strategy: never",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_rotexps_own_are_taken(name: str) -> None:
    check_strategy(STRATEGIES[name])


def test_the_example_is_taken_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    from last_layers import LastLayers  # type: ignore[import-not-found]

    check_strategy(LastLayers, count=1)
    with pytest.raises(AssertionError, match=r"LastLayers.* raised ValueError: .*sharding\.count=0: must be 1 or more"):
        check_strategy(LastLayers, count=0)


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_what_is_wrong_is_found(cls: type[Sharding]) -> None:
    with pytest.raises(AssertionError, match=BROKEN[cls]):
        check_strategy(cls)


def test_bytes_that_are_not_those_stated_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shard_half(network: nn.Module, *arguments: Any, units: list[nn.Module], **options: Any) -> Any:
        return shard(network, *arguments, units=units[:-1], **options)

    shard = checks.shard
    monkeypatch.setattr(checks, "shard", shard_half)

    with pytest.raises(AssertionError, match=r"\d+ bytes are stated and \d+ held"):
        check_strategy(SplitsUnits)


class SplitsUnits(Sharding):
    def shards_unit(self, index: int | None, *, num_units: int) -> bool:
        return index is not None
