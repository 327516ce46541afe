"""A sharding strategy of the user's own: how a configuration names it, its options, its world, what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from rotexp.config.composition import resolved_yaml, to_config, to_plain
from rotexp.config.schema import Config
from rotexp.config.validation import validate_world
from rotexp.launch.command_line import register
from rotexp.launch.start import choose_world_size
from rotexp.sharding.options import ShardingConfig
from rotexp.sharding.strategies import Full, check_strategy_options, strategy_of
from rotexp.sweep.devices import with_share_of_threads
from rotexp.tracking.naming import option_name

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "last_layers"


def composed(folder: Path, *overrides: str, plugin: str = "last_layers") -> Config:
    register()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        whole = compose("config", overrides=[f"hydra.searchpath=[file://{folder}]", *overrides])
    return to_config(whole, typed=[plugin])


@pytest.fixture(autouse=True)
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


def test_it_is_named_by_its_class_and_its_options_stand_beside_the_target() -> None:
    config = composed(EXAMPLE / "conf", "sharding=last_layers", "sharding.count=1", "sharding.min_shard_size=3")
    sharding = config.sharding
    assert (sharding.strategy, sharding.options, sharding.min_shard_size) == ("LastLayers", {"count": 1}, 3)
    plain = to_plain(config)
    assert plain["sharding"]["count"] == 1
    assert option_name(plain, "sharding") == "LastLayers"
    assert "  strategy: LastLayers\n" in resolved_yaml(config)
    assert [strategy_of(sharding).shards_unit(index, num_units=5) for index in range(5)] == [*[False] * 3, True, False]
    assert composed(EXAMPLE / "conf", "sharding=last_layers", "sharding.strategy=last").sharding.strategy == "last"


def test_its_smallest_world_is_taken_on_a_cpu_and_threads_are_divided_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    config = composed(EXAMPLE / "conf", "sharding=last_layers")
    assert choose_world_size(config) == 2
    assert with_share_of_threads(config, accelerators=0, jobs_at_once=2).launch.threads == 2
    validate_world(config, world_size=2)
    with pytest.raises(ValueError, match=r"sharding\.strategy=LastLayers: .* 2 or more ranks, not 1; set launch"):
        validate_world(config, world_size=1)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sharding.count=0", r"sharding\.count=0: must be 1 or more; use sharding=no_shard"),
        ("sharding.count=three", r"sharding\.count=three: must be a whole number"),
        ("+sharding.depth=3", r"sharding\.depth: is no option of last_layers\.LastLayers; choose one of count"),
        ("sharding.precision=bf16", r"sharding\.precision=bf16: must be none or fp32 here; set model\.dtype"),
        ("sharding.replicate=2", r"sharding\.replicate=2: must be null for a one-dimensional strategy"),
        ("sharding.sim_world=2", r"sharding\.sim_world=2: must be left out where no master is split"),
        ("sharding.reshard_after_forward=2", r"sharding\.reshard_after_forward=2: must be null here"),
        ("sharding.strategy=full", r"sharding\.strategy=full: must be another name than no_shard, full, .*LastLayers"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(override: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        composed(EXAMPLE / "conf", "sharding=last_layers", override)


def test_rotexps_own_may_be_named_by_their_class_too() -> None:
    sharding = ShardingConfig("mine", _target_="rotexp.sharding.strategies.Full")
    assert isinstance(strategy_of(sharding), Full)


class Unfinished(Full):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._fail("made")

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise KeyError(where) if where == "made" else SystemExit(0)

    def validate(self, sharding: ShardingConfig) -> None:
        self._fail("validate")


@pytest.mark.parametrize(
    ("target", "options", "line"),
    [
        ("Unfinished", {"where": "made"}, "Unfinished: cannot be made of its options (KeyError: 'made'); change them"),
        ("Unfinished", {}, "Unfinished: cannot be made of its options (TypeError: "),
        ("Unfinished", {"where": "validate"}, "Unfinished: validate does not work (SystemExit: 0); correct it"),
        ("Path", {}, "Path: has no minimum_world, which rotexp.sharding.strategies.Strategy asks for; add it"),
    ],
)
def test_one_that_does_not_work_is_refused_in_one_line(target: str, options: dict[str, str], line: str) -> None:
    sharding = ShardingConfig("mine", _target_=f"test_own_strategy.{target}", options=options)
    with pytest.raises(ValueError, match=re.escape(f"sharding._target_=test_own_strategy.{line}")) as refusal:
        check_strategy_options(sharding)
    assert "\n" not in str(refusal.value)
