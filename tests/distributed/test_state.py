"""States saved by one world are loaded by another bit for bit, averages do not depend on the world, faults are shared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ranks_state as on_ranks
from world import run_world

WORLDS = [1, 2, 4]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    """What four ranks saved."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = run_world(on_ranks.save, str(folder / "run"), False, world_size=4, folder=folder)
    return ranks, Path(ranks[0]["path"])


def check_bits(found: dict[str, np.ndarray]) -> None:
    expected = on_ranks.known_bits()
    assert found.keys() == expected.keys()
    for name, bits in expected.items():
        np.testing.assert_array_equal(found[name], bits, err_msg=name)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_four_ranks_save_others_load_bit_for_bit(tmp_path: Path, checkpoint, world_size: int) -> None:
    saving, path = checkpoint
    ranks = run_world(on_ranks.read, str(path), world_size=world_size, folder=tmp_path)
    check_bits(ranks[0]["bits"])
    assert all(rank["facts"] == {"epoch": 2} for rank in ranks)
    assert all(rank["bits"] == {} for rank in ranks[1:])
    for saved, rank in zip(saving, ranks, strict=False):
        assert rank["restored"] is (world_size == 4)
        assert np.array_equal(rank["drawn"], saved["drawn"]) is (world_size == 4)


def test_every_rank_writes_its_own_part(checkpoint) -> None:
    files = checkpoint[0][0]["files"]
    assert {f"__{rank}_0.distcp" for rank in range(4)} | {f"random-{rank}.pt" for rank in range(4)} <= set(files)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_smaller_world_writes_meanwhile_is_what_it_held_at_the_call(tmp_path: Path, world_size: int) -> None:
    saving = run_world(on_ranks.save, str(tmp_path / "run"), True, world_size=world_size, folder=tmp_path)
    ranks = run_world(on_ranks.read, saving[0]["path"], world_size=4, folder=tmp_path)
    check_bits(ranks[0]["bits"])


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_full_state_goes_round(tmp_path: Path, world_size: int) -> None:
    ranks = run_world(on_ranks.round_trip, world_size=world_size, folder=tmp_path)
    assert [bool(rank["names"]) for rank in ranks] == [True] + [False] * (world_size - 1)
    check_bits(ranks[0]["bits"])


def test_faults_are_named_on_all_ranks_alike(tmp_path: Path) -> None:
    saving = run_world(on_ranks.save, str(tmp_path / "run"), False, world_size=2, folder=tmp_path)
    ranks = run_world(on_ranks.faults, saving[0]["path"], world_size=2, folder=tmp_path)
    assert ranks[0] == ranks[1]
    for way, what in (("sharded", f"resume={saving[0]['path']}"), ("full", "the average")):
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


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("place", ["torch.distributed.checkpoint.filesystem._write_item", "torch.save"])
def test_a_full_disk_of_one_rank_fails_all_alike_and_saving_goes_on(
    tmp_path: Path, place: str, asynchronous: bool
) -> None:
    """The disk is full because the writer says so, on the last rank alone."""
    ranks = run_world(on_ranks.full_disk, str(tmp_path / "run"), place, asynchronous, world_size=2, folder=tmp_path)
    for rank in ranks:
        assert rank["message"] == ranks[0]["message"]
        assert rank["message"].startswith("OSError: the checkpoint ")
        assert "No space left on device" in rank["message"]
        assert "train.checkpoint_every" in rank["message"]
        assert "\n" not in rank["message"]
        assert rank["before"] == rank["after"] == ["latest", "step-00000001"]
        assert (rank["found"], rank["skipped"]) == ("step-00000003", [])


def test_an_average_does_not_depend_on_the_world(tmp_path: Path) -> None:
    (alone,) = run_world(on_ranks.average, str(tmp_path / "1"), world_size=1, folder=tmp_path)
    whole = sum(array.size for array in alone["average"].values())
    assert alone["local_numbers"] == whole
    assert np.abs(alone["output"] - alone["live_output"]).max() > 0.1
    for world_size in (2, 4):
        ranks = run_world(on_ranks.average, str(tmp_path / str(world_size)), world_size=world_size, folder=tmp_path)
        for rank in ranks:
            assert rank["restored"]
            assert rank["collectives"] == 0
            np.testing.assert_allclose(rank["output"], alone["output"], rtol=0, atol=1e-6)
            np.testing.assert_array_equal(rank["output"], ranks[0]["output"])
        for name, array in alone["average"].items():
            np.testing.assert_array_equal(ranks[0]["average"][name], array, err_msg=name)
        assert max(rank["local_numbers"] for rank in ranks) < 36 + (whole - 36) / world_size + 3 * 6 + 3


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(4, 1), (1, 4), (2, 4)])
def test_an_average_is_loaded_by_another_world(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    saving = run_world(on_ranks.average, str(tmp_path / "run"), world_size=saved_by, folder=tmp_path)
    ranks = run_world(on_ranks.load_average, saving[0]["path"], world_size=loaded_by, folder=tmp_path)
    assert all(rank["num_updates"] == 5 for rank in ranks)
    for name, array in saving[0]["average"].items():
        np.testing.assert_array_equal(ranks[0]["average"][name], array, err_msg=name)
    np.testing.assert_allclose(ranks[0]["output"], saving[0]["output"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 4), (4, 1)])
def test_the_average_of_a_master_is_exact_and_survives_another_world(
    tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """0.8 of the average and 0.2 of the value, of a value that doubles: 1, 1.2, 1.76, 3.008."""
    ranks = run_world(on_ranks.average_master, str(tmp_path / "run"), world_size=saved_by, folder=tmp_path)
    start = np.concatenate([array.ravel() for array in ranks[0]["start"].values()])
    np.testing.assert_allclose(ranks[0]["average"], 3.008 * start, rtol=1e-6)
    assert all(rank["restored"] for rank in ranks)
    for rank in ranks:
        np.testing.assert_array_equal(rank["applied"], ranks[0]["applied"])
        np.testing.assert_allclose(rank["applied"], 3.008 * ranks[0]["start"]["embedding.weight"], rtol=2.0**-8)
    loaded = run_world(on_ranks.load_master_average, ranks[0]["path"], world_size=loaded_by, folder=tmp_path)
    for rank in loaded:
        assert rank["num_updates"] == 3
        np.testing.assert_array_equal(rank["applied"], ranks[0]["applied"])
