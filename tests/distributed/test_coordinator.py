"""One start, one gradient, one norm, one clip on all ranks; and a divergence is seen, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ranks_coordinator as on_ranks
from world import run_world


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_averaged_by_one_collective(tmp_path: Path, world_size: int) -> None:
    for rank in run_world(on_ranks.consolidate, world_size=world_size, folder=tmp_path):
        np.testing.assert_allclose(rank["R1"], (world_size + 1) / 2)
        np.testing.assert_allclose(rank["R2_0"], 1 / world_size)
        assert rank["R2_1"] is None
        assert rank["numbers"] == [(world_size - 1) / 2, float(world_size)]
        np.testing.assert_allclose(rank["bias"], (world_size - 1) / 2)
        assert rank["collectives"] == 1


def test_start_is_rank_zeros_everywhere(tmp_path: Path) -> None:
    ranks = run_world(on_ranks.broadcast, world_size=4, folder=tmp_path)
    for rank in ranks:
        difference, names, odd = rank["apart"]
        assert difference > 0.1
        assert names == ("R1", "R2_0", "R2_1")
        assert odd == (1, 2, 3)
        assert rank["broadcasts"] == 1
        assert rank["after"] == 0.0
        np.testing.assert_array_equal(rank["R2_1"], ranks[0]["R2_1"])


@pytest.mark.parametrize("policy", ["log", "raise", "rebroadcast"])
def test_one_flipped_bit_is_found(tmp_path: Path, policy: str) -> None:
    for rank in run_world(on_ranks.plant_one_bit, policy, world_size=2, folder=tmp_path):
        assert rank["quiet"] == (0.0, (), 1)
        difference, names, odd = rank["found"]
        assert 0.0 < difference < 1e-6
        assert names == ("R2_0",)
        assert odd == (1,)
        assert (rank["after"] == 0.0) is (policy == "rebroadcast")
        assert ("step 7" in rank["raised"] and "R2_0" in rank["raised"]) is (policy == "raise")


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_norm_and_clip_equal_one_process(tmp_path: Path, max_norm: float) -> None:
    (expected,) = run_world(on_ranks.clip, 1, max_norm, world_size=1, folder=tmp_path)
    assert expected["norms"][0] == pytest.approx(np.hypot(*expected["norms"][1:]))
    assert bool(np.linalg.norm(expected["rows"]) < 0.5) == (max_norm == 0.5)
    for world_size, replicate in ((2, 1), (4, 2)):
        ranks = run_world(on_ranks.clip, replicate, max_norm, world_size=world_size, folder=tmp_path)
        shards = world_size // replicate
        for rank, found in enumerate(ranks):
            assert found["norms"] == ranks[0]["norms"]
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
            np.testing.assert_allclose(found["R1"], expected["R1"], rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(found["bias"], expected["bias"], rtol=1e-4, atol=1e-6)
            rows = np.array_split(expected["rows"], shards)[rank % shards]
            np.testing.assert_allclose(found["rows"], rows, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(tmp_path: Path, max_norm: float | None) -> None:
    """Also after a clip, whose coefficient is then no number and would spoil every gradient."""
    for rank in run_world(on_ranks.find_nonfinite, max_norm, world_size=2, folder=tmp_path):
        assert rank == {
            "": (None, True),
            "last.bias": ("last.bias", False),
            "first.weight": ("first.weight", False),
            "rotation_bank.R2_1": ("rotation_bank.R2_1", False),
        }


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_weight_of_the_master_is_named_on_all_ranks(tmp_path: Path, world_size: int) -> None:
    for name, norms in run_world(on_ranks.find_nonfinite_in_master, world_size=world_size, folder=tmp_path):
        assert name == "last.weight"
        assert norms == [float("inf")] * 2


@pytest.mark.parametrize(("world_size", "replicate"), [(2, 1), (4, 2)])
def test_whatever_ranks_hold_alike_is_compared_and_repaired(tmp_path: Path, world_size: int, replicate: int) -> None:
    odd, exact = (world_size - 1,), pytest.approx
    ranks = run_world(on_ranks.plant_in_what_ranks_hold, replicate, world_size=world_size, folder=tmp_path)
    for index, rank in enumerate(ranks):
        assert rank["nothing"] == {"found": ({}, (), 0.0), "every": {}, "repaired": False, "restored": True}
        expected = {
            "a weight": ({"last.bias": 0.25}, odd, 0.25),
            "a weight and a rotation": ({"R1": 0.5, "last.bias": 0.25}, odd, 0.5),
            "a frozen weight": ({}, (), 0.0),
            "no number": ({"last.bias": np.inf}, odd, np.inf),
            "a shard": ({"first.weight": 2.0}, odd, 2.0) if replicate > 1 else ({}, (), 0.0),
        }
        for case, (differences, strayed, largest) in expected.items():
            found = rank[case]
            assert found["found"] == (exact(differences, abs=1e-6), strayed, exact(largest, abs=1e-6)), case
            assert found["repaired"] is (case != "a shard" or replicate > 1)
            assert found["restored"] is (found["repaired"] or index not in odd), case
        assert rank["a frozen weight"]["every"] == {"last.weight": exact(0.125, abs=1e-6)}
        assert rank["beside"] == ranks[0]["beside"], "its moment and its average come along"
        assert rank["beside"][0] == 0.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_weight_of_the_master_is_what_the_master_says(tmp_path: Path, world_size: int) -> None:
    for rank in run_world(on_ranks.spoil_the_masters, world_size=world_size, folder=tmp_path):
        differences, ranks = rank["found"]
        assert differences == {"first.weight": pytest.approx(0.25, abs=1e-6)}
        assert ranks == tuple(range(1, world_size))
        assert rank["restored"]
        assert rank["after"] == ()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raise", "rebroadcast"])
def test_a_weight_that_strays_in_a_run_is_found(tmp_path: Path, policy: str) -> None:
    for rank in run_world(on_ranks.spoil_a_run, policy, str(tmp_path), world_size=2, folder=tmp_path):
        if policy == "raise":
            assert (
                f"step 2: {on_ranks.SPOILED} differ from the first replica's on rank 1 by up to 2.5e-01"
                in rank["error"]
            )
            continue
        assert [row["replica/num_divergent"] for row in rank["rows"]] == [0, 1, 0]
        assert rank["rows"][1]["replica/max_abs_diff"] == pytest.approx(0.25, abs=1e-6)
        assert rank["divergence"] == 0.0
