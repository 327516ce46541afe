"""States saved by one world are loaded by another bit for bit; averages do not depend on the world; all fail alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import ranks_state as on_ranks
from world import run_world

pytestmark = pytest.mark.slow

WORLDS = [1, 2, 4]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    """What four ranks saved."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = run_world(on_ranks.save, str(folder / "run"), False, world_size=4, folder=folder)
    return ranks, Path(ranks[0]["path"])


@pytest.fixture(scope="module")
def averages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """What the ranks of every world averaged."""
    folder = tmp_path_factory.mktemp("averages")
    return {
        world_size: run_world(on_ranks.average, str(folder / str(world_size)), world_size=world_size, folder=folder)
        for world_size in WORLDS
    }


def check_bits(found: dict[str, np.ndarray]) -> None:
    expected = on_ranks.known_bits()
    assert found.keys() == expected.keys()
    for name, bits in expected.items():
        np.testing.assert_array_equal(found[name], bits, err_msg=name)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_four_ranks_save_others_load_gather_and_spread_bit_for_bit(
    tmp_path: Path, checkpoint, world_size: int
) -> None:
    saving, path = checkpoint
    ranks = run_world(on_ranks.read, str(path), world_size=world_size, folder=tmp_path)
    check_bits(ranks[0]["loaded"])
    check_bits(ranks[0]["spread"])
    assert all(rank["facts"] == {"epoch": 2} for rank in ranks)
    assert all(rank["loaded"] == rank["spread"] == {} for rank in ranks[1:])
    for saved, rank in zip(saving, ranks, strict=False):
        assert rank["restored"] is (world_size == 4)
        assert np.array_equal(rank["drawn"], saved["drawn"]) is (world_size == 4)


def test_every_rank_writes_its_own_part(checkpoint) -> None:
    files = checkpoint[0][0]["files"]
    assert {f"__{rank}_0.distcp" for rank in range(4)} | {f"random-{rank}.pt" for rank in range(4)} <= set(files)


def test_what_is_written_later_is_what_was_held_at_the_call(tmp_path: Path) -> None:
    saving = run_world(on_ranks.save, str(tmp_path / "run"), True, world_size=2, folder=tmp_path)
    ranks = run_world(on_ranks.read, saving[0]["path"], world_size=4, folder=tmp_path)
    check_bits(ranks[0]["loaded"])


def test_faults_are_named_on_all_ranks_alike(tmp_path: Path, checkpoint) -> None:
    path = shutil.copytree(checkpoint[1], tmp_path / "step-00000003")
    ranks = run_world(on_ranks.faults, str(path), world_size=2, folder=tmp_path)
    assert ranks[0] == ranks[1]
    for way, what in (("sharded", f"resume={path}"), ("full", "the average")):
        text = ranks[0][way]
        assert text.startswith(f"ValueError: {what}: ")
        assert "\n" not in text
        for fault in (
            "extra is missing",
            "rotation is unexpected",
            "small is [3, 2] float32 instead of [3, 3] float32",
        ):
            assert fault in text
    assert ranks[0]["untouched"] == "True"
    assert "__1_0.distcp is truncated (10 instead of" in ranks[0]["truncated"]


def test_a_full_disk_of_one_rank_fails_all_alike_and_saving_goes_on(tmp_path: Path) -> None:
    """The disk is full because the writer says so, on the last rank alone."""
    ranks = run_world(on_ranks.full_disk, str(tmp_path / "run"), world_size=2, folder=tmp_path)
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 4
    for case in ranks[0]:
        assert case["message"].startswith("OSError: the checkpoint ")
        assert "No space left on device" in case["message"]
        assert "train.checkpoint_every" in case["message"]
        assert "\n" not in case["message"]
        assert case["before"] == case["after"] == ["latest", "step-00000001"]
        assert (case["found"], case["skipped"]) == ("step-00000003", [])


def test_an_average_does_not_depend_on_the_world(averages: dict[int, list[dict]]) -> None:
    (alone,) = averages[1]
    whole = sum(array.size for array in alone["average"].values())
    assert np.abs(alone["output"] - alone["live_output"]).max() > 0.1
    for world_size, ranks in averages.items():
        for rank in ranks:
            assert rank["restored"]
            assert rank["collectives"] == 0
            np.testing.assert_allclose(rank["output"], alone["output"], rtol=0, atol=1e-6)
            np.testing.assert_array_equal(rank["output"], ranks[0]["output"])
            rows_too_many, rotation_and_count = 6 + 6 + 1 + 1, 36 + 1
            share = (whole - rotation_and_count) / world_size
            assert rank["local_numbers"] <= rotation_and_count + share + rows_too_many
        for name, array in alone["average"].items():
            np.testing.assert_array_equal(ranks[0]["average"][name], array, err_msg=name)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(4, 1), (2, 4)])
def test_an_average_is_loaded_by_another_world(
    tmp_path: Path, averages: dict[int, list[dict]], saved_by: int, loaded_by: int
) -> None:
    saving = averages[saved_by]
    ranks = run_world(on_ranks.load_average, saving[0]["path"], world_size=loaded_by, folder=tmp_path)
    assert all(rank["num_updates"] == 5 for rank in ranks)
    for name, array in saving[0]["average"].items():
        np.testing.assert_array_equal(ranks[0]["average"][name], array, err_msg=name)
    np.testing.assert_allclose(ranks[0]["output"], saving[0]["output"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (4, 1)])
def test_the_average_of_a_master_is_exact_and_survives_another_world(
    tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """0.8 of the average and 0.2 of the value, of a value that doubles: 1, 1.2, 1.76, 3.008."""
    ranks = run_world(on_ranks.average_master, str(tmp_path / "run"), world_size=saved_by, folder=tmp_path)
    start = np.concatenate([array.ravel() for array in ranks[0]["start"].values()])
    np.testing.assert_allclose(ranks[0]["average"], 3.008 * start, rtol=1e-6)
    for rank in ranks:
        assert rank["restored"]
        np.testing.assert_array_equal(rank["applied"], ranks[0]["applied"])
        np.testing.assert_allclose(rank["applied"], 3.008 * ranks[0]["start"]["embedding.weight"], rtol=2.0**-8)
    loaded = run_world(on_ranks.load_master_average, ranks[0]["path"], world_size=loaded_by, folder=tmp_path)
    for rank in loaded:
        assert rank["num_updates"] == 3
        np.testing.assert_array_equal(rank["applied"], ranks[0]["applied"])
