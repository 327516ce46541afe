"""Three steps, a checkpoint and three more are six, bit for bit; and another world takes over every number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_resume import NUM_BLOCKS, Job, read_checkpoint, run_jobs
from safetensors.numpy import load_file
from world import run_world

EVERYTHING = (
    "train.params=all",
    "train.steps=6",
    "train.checkpoint_every=3",
    "train.keep_checkpoints=2",
    "ema.decay=0.9",
    "optimizer.momentum=0.5",
    "objective=kl",
    "evaluation.max_windows=2",
)
WHOLE = (*EVERYTHING, "train.async_checkpoints=true")
FULL = (*EVERYTHING, "sharding=full", "sharding.min_shard_size=100")
MASTER = (*EVERYTHING, "sharding=zero2_master", "train.micro_batch_size=2")
HALF = (*EVERYTHING, "sharding=zero2_master", "model.dtype=bfloat16", "train.params=rotations_and_norms")
SCALES = (*EVERYTHING, "sharding=full", "train.params=rotations_and_scales", "objective=ce")

SIX = {
    1: {"whole": WHOLE},
    2: {"full": FULL, "master": MASTER, "half": HALF, "scales": SCALES},
    4: {"full4": FULL},
}
"""The runs of six steps, by the size of their world."""

ELSEWHERE = {
    1: {"full, whole": WHOLE, "master, whole": WHOLE, "scales, whole": (*SCALES, "sharding=no_shard")},
    2: {"whole, full": FULL, "full, master": MASTER, "master, full": FULL, "full4, full": FULL},
    4: {"whole, master": MASTER, "master, zero2": (*EVERYTHING, "sharding=zero2"), "half, half": HALF},
}
"""Where their checkpoints of the third step are loaded too; the first word says which."""


def folder_of(root: Path, name: str) -> Path:
    """Return the folder of a run of six steps."""
    (world_size,) = [size for size, runs in SIX.items() if name in runs]
    return root / f"six{world_size}" / name


def halfway(root: Path, name: str) -> Path:
    """Return the checkpoint of a run's third step."""
    return folder_of(root, name) / "checkpoints" / "step-00000003"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def six(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of six steps, by rank."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size, runs in SIX.items():
        folder = root / f"six{world_size}"
        folder.mkdir()
        jobs = {name: Job(overrides) for name, overrides in runs.items()}
        ranks = run_world(run_jobs, jobs, str(folder), world_size=world_size, folder=folder)
        found |= {name: [rank[name] for rank in ranks] for name in runs}
    return found


@pytest.fixture(scope="module")
def resumed(root: Path, six: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that begin at those checkpoints: "again" goes on to the sixth step, the others end where they begin."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size, runs in ELSEWHERE.items():
        folder = root / f"then{world_size}"
        folder.mkdir()
        jobs = {f"{name}, again": Job(given, str(halfway(root, name))) for name, given in SIX[world_size].items()}
        for name, given in runs.items():
            steps = () if name in FURTHER else ("train.steps=3",)
            jobs[name] = Job((*given, *steps), str(halfway(root, name.partition(",")[0])))
        ranks = run_world(run_jobs, jobs, str(folder), world_size=world_size, folder=folder)
        found |= {name: [rank[name] for rank in ranks] for name in jobs}
    return found


FURTHER = ("whole, master", "full4, full")
NAMES = [name for runs in SIX.values() for name in runs]
OTHERS = [(world_size, name) for world_size, runs in ELSEWHERE.items() for name in runs]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]


@pytest.mark.parametrize("name", NAMES)
def test_three_and_three_steps_are_six_bit_for_bit(six: Any, resumed: Any, root: Path, name: str) -> None:
    straight = folder_of(root, name)
    (again,) = root.glob(f"then*/{name}, again")
    assert [rank["error"] for rank in resumed[f"{name}, again"]] == [None] * len(six[name])
    first, second = steps_of(straight), steps_of(again)
    assert [row["step"] for row in second] == [4, 5, 6]
    for key in ("train/loss", "grad_norm/total", "grad_norm/weights", "train/lr", "train/lr_weights", "train/tokens"):
        assert [row[key] for row in second] == [row[key] for row in first[3:]], key
    files = ["rotations", "rotations_best", "rotations_average", "weights"]
    for file in files:
        expected, found = (load_file(folder / f"{file}.safetensors") for folder in (straight, again))
        assert expected.keys() == found.keys()
        for tensor in expected:
            np.testing.assert_array_equal(found[tensor], expected[tensor], err_msg=f"{file} {tensor}")
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (straight, again)]
    assert ends[0]["evaluation"] == ends[1]["evaluation"]
    for key in ("steps", "loss_start", "loss_end", "best_step", "improved"):
        assert ends[0]["train"][key] == ends[1]["train"][key]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_the_last_checkpoint_is_the_same(six: Any, resumed: Any, root: Path, name: str) -> None:
    (again,) = root.glob(f"then*/{name}, again")
    ends = [read_checkpoint(folder / "checkpoints" / "step-00000006") for folder in (folder_of(root, name), again)]
    assert ends[0].keys() == ends[1].keys()
    for tensor in ends[0]:
        np.testing.assert_array_equal(ends[0][tensor], ends[1][tensor], err_msg=tensor)


@pytest.mark.parametrize("name", NAMES)
def test_random_states_go_on_where_they_were(six: Any, resumed: Any, name: str) -> None:
    for before, after in zip(six[name], resumed[f"{name}, again"], strict=True):
        assert after["next"] == before["drawn"][3]
    assert len({rank["next"] for rank in resumed[f"{name}, again"]}) == len(six[name])


def test_a_checkpoint_holds_momenta_moments_averages_and_cached_ratios(six: Any, root: Path) -> None:
    held = read_checkpoint(halfway(root, "whole"))
    for name in ("rotations/R1", "best/R1", "start/R1", "optimizer/R1/momentum_buffer", "ema/rotation_bank.R1"):
        assert np.abs(held[name]).max() > 0
    weight = "model.layers.1.mlp.down_proj.weight"
    for name in (f"weights/{weight}", f"optimizer/{weight}/exp_avg", f"optimizer/{weight}/exp_avg_sq", f"ema/{weight}"):
        assert held[name].shape == (48 * 80,)
        assert np.abs(held[name]).max() > 0
    assert held[f"optimizer/{weight}/step"] == held["ema/num_updates"] == 3
    assert np.ptp(held[f"clip_ratios/{weight}"]) > 0
    assert not np.array_equal(held["rotations/R1"], held["start/R1"])
    assert not np.array_equal(held[f"ema/{weight}"], held[f"weights/{weight}"])


@pytest.mark.parametrize(("world_size", "name"), OTHERS)
def test_another_world_or_strategy_loads_every_bit(
    six: Any, resumed: Any, root: Path, world_size: int, name: str
) -> None:
    expected = read_checkpoint(halfway(root, name.partition(",")[0]))
    first, *others = resumed[name]
    assert first["error"] is None
    assert first["loaded"].keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(first["loaded"][tensor], values, err_msg=tensor)
    assert len(others) == world_size - 1
    for rank in resumed[name]:
        for weight, values in rank["compute_weights"].items():
            np.testing.assert_array_equal(values, first["compute_weights"][weight], err_msg=weight)


@pytest.mark.parametrize(("world_size", "name"), OTHERS)
def test_what_is_not_carried_is_said(six: Any, resumed: Any, world_size: int, name: str) -> None:
    source = name.partition(",")[0]
    (saved_by,) = [size for size, runs in SIX.items() if source in runs]
    said = f"random states are not carried from {saved_by} to {world_size} ranks"
    for rank in resumed[name]:
        assert any(said in note for note in rank["notes"]) is (saved_by != world_size)
    output = resumed[name][0]["output"]
    assert "resume: resumed from" in output
    assert "step-00000003 after step 3" in output
    assert (said in output) is (saved_by != world_size)


@pytest.mark.parametrize(("source", "name"), [("whole", "whole, master"), ("full4", "full4, full")])
def test_another_world_sees_every_block_once_an_epoch(six: Any, resumed: Any, source: str, name: str) -> None:
    """An epoch is four steps of 8 blocks: three before the checkpoint, one after."""
    taken = [3 * 8 // len(six[source]), 8 // len(resumed[name])]
    before = [block for rank in six[source] for block in rank["blocks"][: taken[0]]]
    after = [block for rank in resumed[name] for block in rank["blocks"][: taken[1]]]
    assert len(set(before) | set(after)) == len(before) + len(after) == 32
    assert set(before) | set(after) <= set(range(NUM_BLOCKS))
    again = [block for rank in resumed[f"{source}, again"] for block in rank["blocks"][: 8 // len(six[source])]]
    assert sorted(again) == sorted(after)


def test_the_next_steps_of_another_world_agree_to_rounding(six: Any, resumed: Any, root: Path) -> None:
    straight = [row["train/loss"] for row in steps_of(folder_of(root, "full4"))]
    found = [row["train/loss"] for row in steps_of(root / "then2" / "full4, full")]
    np.testing.assert_allclose(found[0], straight[3], rtol=1e-4)
