"""The split master trains as unsharded AdamW does, and all ranks hold the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_master as on_ranks
import torch
from ranks_master import NUM_BUCKETS, Net
from world import run_world

pytestmark = pytest.mark.slow

Arrays = dict[str, np.ndarray]
BF16 = {"steps": 40, "lr": 3e-4}
SIZE = sum(parameter.numel() for parameter in Net().parameters())


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_close(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


def flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays.values()])


def as_bf16(arrays: Arrays) -> Arrays:
    return {name: torch.from_numpy(array).bfloat16().float().numpy() for name, array in arrays.items()}


@pytest.mark.parametrize(("world_size", "parts"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_training_equals_unsharded_adamw(tmp_path: Path, world_size: int, parts: int) -> None:
    steps = 6
    expected, norms = on_ranks.unsharded(steps)
    ranks = run_world(on_ranks.train, parts, steps, world_size=world_size, folder=tmp_path)
    compare = assert_equal if world_size == parts == 1 else assert_close
    for rank, found in enumerate(ranks):
        for at_step, wanted in zip(found["weights"], expected, strict=True):
            compare(at_step, wanted)
        assert_equal(found["weights"][-1], ranks[0]["weights"][-1])
        assert found["kept"] == []
        assert found["spills"] == steps * (parts - 1)
        assert found["moments"] == -(-SIZE // world_size)
        assert found["norm_dtype"] == "torch.float32"
        assert found["norm_bits"] == ranks[0]["norm_bits"]
        assert found["norms"] == pytest.approx(norms, rel=1e-6)
        assert found["collectives"] == [0 if world_size == 1 else 2 * NUM_BUCKETS + 1] * steps
        assert bool(found["master"]) is (rank == 0)
    assert_equal(ranks[0]["master"], ranks[0]["weights"][-1])


@pytest.fixture(scope="module", params=[2, 4])
def bf16_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, having trained bf16 weights."""
    folder = tmp_path_factory.mktemp("bf16")
    return run_world(on_ranks.train_bf16, *BF16.values(), world_size=request.param, folder=folder)


def test_bf16_weights_follow_their_master_bit_for_bit(bf16_ranks: list[dict[str, Any]]) -> None:
    expected = on_ranks.exact_unsharded(len(bf16_ranks), **BF16, dtype=torch.float32)
    assert_equal(bf16_ranks[0]["master"], expected)
    for found in bf16_ranks:
        assert_equal(found["weights"], as_bf16(expected))
        assert found["bytes_published"] == 2 * -(-SIZE // len(bf16_ranks)), "they travel in bf16"


def test_updates_below_the_resolution_of_bf16_move_its_weights(bf16_ranks: list[dict[str, Any]]) -> None:
    begun = flat(on_ranks.weights(Net(torch.bfloat16)))
    held_in_bf16 = flat(on_ranks.exact_unsharded(len(bf16_ranks), **BF16, dtype=torch.bfloat16))
    near_one = (np.abs(begun) > 0.5) & (np.abs(begun) < 2.0)
    assert (held_in_bf16 == begun)[near_one].mean() > 0.95
    assert (flat(bf16_ranks[0]["weights"]) != begun)[near_one].mean() > 0.95


def test_pieces_cover_the_vector_once(bf16_ranks: list[dict[str, Any]]) -> None:
    whole, count = np.zeros(SIZE, dtype=np.float32), np.zeros(SIZE, dtype=int)
    for found in bf16_ranks:
        assert found["size"] == SIZE
        offsets = [offset for offset, _ in found["pieces"]]
        assert offsets == sorted(offsets)
        for offset, piece in found["pieces"]:
            assert len(piece) > 0
            whole[offset : offset + len(piece)] = piece
            count[offset : offset + len(piece)] += 1
    assert (count == 1).all()
    np.testing.assert_array_equal(whole, flat(bf16_ranks[0]["master"]))


def test_the_whole_of_a_shard_is_gathered_by_name(bf16_ranks: list[dict[str, Any]]) -> None:
    master, moment = bf16_ranks[0]["master"], bf16_ranks[0]["moment"]
    assert {name: array.shape for name, array in master.items()} == {
        name: tuple(parameter.shape) for name, parameter in Net().named_parameters()
    }
    assert not moment["gain"].any()
    assert all(moment[name].all() for name in moment.keys() - {"gain"})
    assert [found["master"] for found in bf16_ranks[1:]] == [{}] * (len(bf16_ranks) - 1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_dropped_step_leaves_nothing_and_loaded_weights_become_the_master(tmp_path: Path, world_size: int) -> None:
    expected, _ = on_ranks.unsharded(1)
    loaded = on_ranks.weights(Net(seed=5))
    ranks = run_world(on_ranks.drop_a_step_and_load, world_size=world_size, folder=tmp_path)
    for rank, found in enumerate(ranks):
        assert found["left"] == []
        assert_close(found["stepped"], expected[0])
        assert_equal(found["rebuilt"], loaded if rank == 0 else {})
        assert_equal(found["published"], loaded)


@pytest.mark.parametrize("world_size", [2, 4])
def test_weights_loaded_on_rank_zero_alone_become_everyones(tmp_path: Path, world_size: int) -> None:
    loaded = on_ranks.weights(Net(seed=5))
    for rank, found in enumerate(run_world(on_ranks.change_rank_zero_alone, world_size=world_size, folder=tmp_path)):
        assert_equal(found["rebuilt"], loaded if rank == 0 else {})
        assert_equal(found["held"], loaded)
        assert_equal(found["published"], loaded)
        assert found["collectives"] == 1, "ranks that agree compare digests and send nothing"
