"""Closed forms of what a rank holds, against counts by hand and against a model on the meta device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import facts
from benchmarks.trained_memory import MemoryRequest, table
from rotexp.config.schema import Config
from rotexp.metrics.static_memory import Bank, StaticBytes, Weight, predict, static_bytes
from rotexp.models.load import open_checkpoint
from rotexp.rotation.building import build_for_run
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.strategies import STRATEGIES
from rotexp.training.options import Trainable

MATRIX = Weight(rows=5, width=3, trained=True, split=True)
WHOLE = Weight(rows=7, width=1, trained=True)


def meta_model(config: Config) -> RotatedModel:
    checkpoint = open_checkpoint(config.model, seed=0)
    return build_for_run(checkpoint, config, dtype=getattr(torch, config.model.dtype.name))


def forecast(strategy: str, *, params: Trainable = Trainable.all, world_size: int = 2, rank: int = 0) -> StaticBytes:
    config = MemoryRequest(strategy, model="nano").config()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, params=params))
    return predict(meta_model(config), config, world_size=world_size, rank=rank)


def test_rows_are_padded_to_the_first_ranks_and_owned_as_they_are() -> None:
    assert [MATRIX.owned(2, place=place) for place in range(2)] == [9, 6]
    assert [MATRIX.owned(4, place=place) for place in range(4)] == [6, 6, 3, 0]
    assert MATRIX.room(2) == 9
    assert MATRIX.room(4) == 6
    assert WHOLE.room(4) == WHOLE.owned(4, place=3) == 7


def test_shards_have_padded_weights_and_gradients_and_moments_of_what_they_own() -> None:
    first, last = (static_bytes([MATRIX, WHOLE], bank=Bank(), shards=4, place=place, ema=True) for place in (0, 3))
    assert first.weights == first.gradients == last.weights == 4 * (6 + 7)
    assert (first.moments, last.moments) == (8 * (6 + 7), 8 * 7)
    assert (first.shadows, last.shadows) == (4 * (6 + 7), 4 * 7)
    assert first.master == first.shard_gradient == 0


def test_a_master_is_one_padded_piece_of_all_that_is_trained() -> None:
    weights = [dataclasses.replace(MATRIX, itemsize=2, split=False), dataclasses.replace(WHOLE, itemsize=2)]
    found = static_bytes(weights, bank=Bank(), master_world=4, ema=True)
    assert found.weights == found.gradients == 2 * 22
    assert found.master == found.shard_gradient == found.shadows == 4 * 6
    assert found.moments == 8 * 6


def test_frozen_weights_have_neither_gradient_nor_moments_nor_shadow() -> None:
    frozen = dataclasses.replace(MATRIX, trained=False, head=True)
    found = static_bytes([frozen], bank=Bank(), shards=2, ema=True)
    assert found == StaticBytes(heads=4 * 9)


def test_a_teacher_has_what_the_checkpoint_has() -> None:
    added = dataclasses.replace(WHOLE, taught=False)
    found = static_bytes([MATRIX, added], bank=Bank(), shards=2, teacher=True, buffers=16)
    assert found.teacher == 4 * 9 + 16


def test_a_bank_is_kept_with_its_start_and_its_best() -> None:
    found = static_bytes([], bank=Bank(bytes=64, trained_bytes=48, state_bytes=48), ema=True)
    assert (found.bank, found.bank_gradients, found.shadows, found.best) == (2 * 64 + 48, 48, 48, 64)
    assert static_bytes([], bank=Bank(bytes=64)).total == 2 * 64


def test_the_best_is_what_a_rank_owns_of_all_that_is_trained() -> None:
    first, last = (static_bytes([MATRIX, WHOLE], bank=Bank(bytes=8), shards=4, place=place) for place in (0, 3))
    assert (first.best, last.best) == (8 + 4 * (6 + 7), 8 + 4 * 7)
    assert static_bytes([dataclasses.replace(MATRIX, trained=False)], bank=Bank()).best == 0
    assert static_bytes([MATRIX, WHOLE], bank=Bank(), master_world=4).best == 4 * 6


def test_gathered_weights_are_outside_the_total_and_gradients_outside_what_stays() -> None:
    found = static_bytes([MATRIX], bank=Bank(bytes=64, trained_bytes=64), shards=2, gathered_itemsize=2)
    assert found.gathered == 2 * 2 * 9
    assert found.total == sum(dataclasses.astuple(found)) - found.gathered - found.best
    assert found.between_steps == found.total - 4 * 9 - 64
    assert found.by_kind() == {**dataclasses.asdict(found), "total": found.total}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_without_memory_is_counted_as_it_will_be(strategy: str) -> None:
    found = forecast(strategy, world_size=4)
    layers = 2 * (48 * (48 + 24 + 24 + 48) + 3 * 48 * 80 + 2 * 48) + 48
    heads = 2 * 2048 * 48
    parts = {"no_shard": 1, "zero2_master": 1, "full": 4, "zero2": 4, "hybrid": 2, "hybrid_zero2": 2}[strategy]
    assert found.weights == 4 * layers // parts
    assert found.heads == 4 * heads // parts
    owners = 4 if strategy == "zero2_master" else parts
    assert found.moments == 8 * (layers + heads) // owners
    assert found.bank == 2 * 4 * (48 * 48 + 2 * 12 * 12)
    assert found.gathered == (4 * (layers + heads) if strategy.endswith("zero2") else 0)


def test_rotations_alone_take_no_gradients_of_weights() -> None:
    found = forecast("full", params=Trainable.rotations)
    assert found.gradients == found.moments == found.master == 0
    assert found.bank_gradients == found.shadows == 4 * (48 * 48 + 2 * 12 * 12)


def test_a_simulated_world_divides_the_master_alone() -> None:
    config = MemoryRequest("zero2_master", model="nano").config()
    simulated = dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, sim_world=64))
    alone, found = (predict(meta_model(each), each, world_size=1) for each in (config, simulated))
    assert found.weights == alone.weights
    assert found.master == pytest.approx(alone.master / 64, abs=4)


def test_the_line_names_the_total_and_what_there_is() -> None:
    line = StaticBytes(weights=3 * 2**20, bank_gradients=2**19).line()
    assert line == "3.5 MiB a rank whatever the batch: weights 3.0, bank gradients 0.5"
    beside = StaticBytes(weights=3 * 2**20, best=2**20, gathered=2**19).line()
    assert beside.endswith(": weights 3.0; in host memory what was best 1.0; gathered from forward to backward 0.5")


def test_the_table_shows_the_fullest_rank_and_the_ratio_furthest_from_one() -> None:
    kinds = StaticBytes(weights=2**20, heads=2**20).by_kind()
    predicted = {"backward": 2**21, "between": 2**21}
    measured = [{"backward": 2**21, "between": 2**20}, {"backward": 2**22, "between": 2**21}]
    ranks = [
        {"kinds": kinds, "predicted": predicted, "measured": held, "peak_rss_gib": peak}
        for held, peak in zip(measured, (0.5, 0.25), strict=True)
    ]
    request = dataclasses.asdict(MemoryRequest("full"))
    text = facts.markdown(table([{"request": request, "by_rank": ranks}])).splitlines()[-1]
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    assert cells[:4] == ["full", "float32", "2", "2.00"]
    assert cells[-7:] == ["2.00", "4.00", "2.000000", "2.00", "2.00", "0.500000", "512.00"]
