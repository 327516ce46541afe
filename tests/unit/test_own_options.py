"""Options of the user's own parts that are called like their group's, and how wrong ones are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest

from rotexp.config.composition import to_config
from rotexp.config.explanations import check_overrides, explain
from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.launch.command_line import register

PARTS = """
class Tracker:
    def __init__(self, run, *, project, tags=(), mode="fast", entity="mine", **more):
        self.got = run, project, list(tags), mode, entity, more

from rotexp.sharding.strategies import Sharding

class Strategy(Sharding):
    def __init__(self, min_shard_size=7, bucket_mib=8, count=1):
        self.got = min_shard_size, bucket_mib, count

class Format:
    def __init__(self, group_size, factor=2.0, bits=3):
        self.got = group_size, factor, bits

class Source:
    def __init__(self, sequence_length, path="here"):
        self.got = sequence_length, path

class MySGD:
    def __init__(self, params, lr):
        pass
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "named_alike.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    register()
    yield
    sys.modules.pop("named_alike", None)


def compose(*overrides: str) -> Config:
    with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
        composed = hydra.compose("config", overrides=list(overrides))
    return to_config(composed, typed=["named_alike"])


def test_the_class_gets_the_group_s_options_that_it_names() -> None:
    config = compose(
        "tracker={_target_: named_alike.Tracker, tags: [a], mode: offline, extra: 1}",
        "sharding={_target_: named_alike.Strategy, min_shard_size: 3, count: 2}",
        "quant.weights={_target_: named_alike.Format, group_size: 32, bits: 16}",
        "data={name: mine, source: null, _target_: named_alike.Source, sequence_length: 64}",
    )
    assert build(config.tracker, "run").got == ("run", "rotexp", ["a"], "offline", "mine", {"extra": 1})
    assert build(config.sharding).got == (3, 8, 2)
    assert build(config.quant.weights).got == (32, 2.0, 3)
    assert build(config.data).got == (64, "here")
    assert (config.tracker.tags, config.sharding.min_shard_size, config.quant.weights.group_size) == (["a"], 3, 32)


def test_an_option_that_is_added_is_checked_against_the_class() -> None:
    with pytest.raises(ValueError, match=re.escape("quant.weights.factr: is no option of named_alike.Format; choose")):
        compose("quant.weights._target_=named_alike.Format", "+quant.weights.factr=1")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["optimizer._target_=named_alike.MySGD"],
            r"optimizer\._target_=named_alike\.MySGD: takes no \w+, an option of optimizer=cayley_sgd in whose place "
            r"it was set; describe it in a file optimizer/NAME\.yaml, and choose it by --config-dir DIR optimizer=NAME",
        ),
        (
            ["sharding._target_=named_alike.Strategy", "+sharding.cont=1"],
            r"sharding\.cont: is no option of named_alike\.Strategy; choose one of min_shard_size, bucket_mib, count, "
            r".*precision, .*or leave it out \(nearest: count\)",
        ),
        (
            ["+sharding.od=1"],
            r"sharding\.od: no such key; sharding has strategy, replicate, ((?!_target_|options).)*; correct it.*",
        ),
        (["+quant.weights.od=1"], r"quant\.weights\.od: no such key; quant\.weights has bits, ((?!_target_).)*"),
    ],
)
def test_wrong_ones_are_refused_with_what_there_is(overrides: list[str], line: str) -> None:
    check_overrides(overrides, sweep=False)
    with pytest.raises(ValueError, match=r".") as caught:
        compose(*overrides)
    assert re.fullmatch(line, explain(caught.value)), explain(caught.value)


@pytest.mark.parametrize("key", ["quant.weights", "quant.activations", "quant.kv", "sharding", "tracker", "data"])
def test_options_may_be_added_wherever_a_part_may_be_named(key: str) -> None:
    check_overrides([f"+{key}.anything=1"], sweep=False)
    with pytest.raises(ValueError, match="no such key"):
        check_overrides(["+train.anything=1"], sweep=False)
