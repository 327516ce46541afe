"""Three steps, a checkpoint and three more are six, bit for bit; and another world takes over every number.

Here by one thread a rank and narrow rotations; tests/cli/test_threads.py has more threads and wide ones.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_resume import NUM_BLOCKS, Job, read_checkpoint, run_jobs
from safetensors.numpy import load_file
from world import run_world

pytestmark = pytest.mark.slow

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
HALF = (*EVERYTHING, "sharding=zero2_master", "model.dtype=bfloat16", "objective=ce")

DRAWN = ("train.steps=6", "train.checkpoint_every=3", "evaluation.max_windows=2")

SIX = {
    1: {"whole": WHOLE, "drawn": DRAWN},
    2: {"full": FULL, "master": MASTER, "half": HALF, "drawn on two": (*DRAWN, "sharding=full")},
    4: {"full4": FULL},
}
"""The runs of six steps, by the size of their world; "again" goes on from their third step, and "drawn" losses draw."""

ELSEWHERE = {
    2: {"whole, full": FULL, "full, master": MASTER, "master, full": FULL},
    4: {"whole, master": MASTER, "master, zero2": (*EVERYTHING, "sharding=zero2"), "half, half": HALF},
    1: {"full4, whole": WHOLE, "master, whole": WHOLE},
}
"""Where their checkpoints of the third step are loaded too; the first word says which."""

FURTHER = ("whole, master", "full4, whole")
"""Which of those go on; the others end where they begin."""


def halfway(root: Path, name: str) -> Path:
    """Return the checkpoint of a run's third step."""
    return root / name / "checkpoints" / "step-00000003"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, list[dict[str, Any]]]:
    """What every rank saw of every run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in (1, 2, 4, None):
        jobs = {name: Job(given, draws="drawn" in name) for name, given in SIX.get(world_size, {}).items()}
        jobs |= {f"{name}, again": replace(job, checkpoint=str(halfway(root, name))) for name, job in jobs.items()}
        others = ELSEWHERE[world_size or 1] if world_size != 1 else {}
        for name, given in others.items():
            steps = () if name in FURTHER else ("train.steps=3",)
            jobs[name] = Job((*given, *steps), str(halfway(root, name.partition(",")[0])))
        ranks = run_world(run_jobs, jobs, str(root), world_size=world_size or 1, folder=root)
        found |= {name: [rank[name] for rank in ranks] for name in jobs}
    return found


NAMES = [name for runs in SIX.values() for name in runs]
OTHERS = [(world_size, name) for world_size, runs in ELSEWHERE.items() for name in runs]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]


@pytest.mark.parametrize("name", NAMES)
def test_three_and_three_steps_are_six_bit_for_bit(runs: Any, root: Path, name: str) -> None:
    straight = root / name
    again = root / f"{name}, again"
    assert [rank["error"] for rank in runs[f"{name}, again"]] == [None] * len(runs[name])
    first, second = steps_of(straight), steps_of(again)
    assert [row["step"] for row in second] == [4, 5, 6]
    for key in ("train/loss", "grad_norm/total", "grad_norm/weights", "train/lr", "train/lr_weights", "train/tokens"):
        assert [row.get(key) for row in second] == [row.get(key) for row in first[3:]], key
    files = sorted(path.stem for path in straight.glob("*.safetensors"))
    assert {"rotations", "rotations_best"} <= set(files)
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
def test_every_tensor_of_the_last_checkpoint_is_the_same(runs: Any, root: Path, name: str) -> None:
    again = root / f"{name}, again"
    ends = [read_checkpoint(folder / "checkpoints" / "step-00000006") for folder in (root / name, again)]
    assert ends[0].keys() == ends[1].keys()
    for tensor in ends[0]:
        np.testing.assert_array_equal(ends[0][tensor], ends[1][tensor], err_msg=tensor)


@pytest.mark.parametrize("name", NAMES)
def test_random_states_go_on_where_they_were(runs: Any, name: str) -> None:
    for before, after in zip(runs[name], runs[f"{name}, again"], strict=True):
        assert after["next"] == before["drawn"][3]
    assert len({rank["next"] for rank in runs[f"{name}, again"]}) == len(runs[name])


def test_a_checkpoint_holds_momenta_moments_averages_and_cached_ratios(runs: Any, root: Path) -> None:
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
def test_another_world_or_strategy_loads_every_bit(runs: Any, root: Path, world_size: int, name: str) -> None:
    expected = read_checkpoint(halfway(root, name.partition(",")[0]))
    first, *others = runs[name]
    assert first["error"] is None
    assert first["loaded"].keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(first["loaded"][tensor], values, err_msg=tensor)
    assert len(others) == world_size - 1
    for rank in runs[name]:
        for weight, values in rank["compute_weights"].items():
            np.testing.assert_array_equal(values, first["compute_weights"][weight], err_msg=weight)


@pytest.mark.parametrize(("world_size", "name"), OTHERS)
def test_what_is_not_carried_is_said(runs: Any, world_size: int, name: str) -> None:
    source = name.partition(",")[0]
    (saved_by,) = [size for size, runs in SIX.items() if source in runs]
    said = f"random states are not carried from {saved_by} to {world_size} ranks"
    for rank in runs[name]:
        assert any(said in note for note in rank["notes"]) is (saved_by != world_size)
    output = runs[name][0]["output"]
    assert "resume: resumed from" in output
    assert "step-00000003 after step 3" in output
    assert (said in output) is (saved_by != world_size)


@pytest.mark.parametrize(("source", "name"), [("whole", "whole, master"), ("full4", "full4, whole")])
def test_another_world_sees_every_block_once_an_epoch(runs: Any, source: str, name: str) -> None:
    """An epoch is four steps of 8 blocks: three before the checkpoint, one after."""
    taken = [3 * 8 // len(runs[source]), 8 // len(runs[name])]
    before = [block for rank in runs[source] for block in rank["blocks"][: taken[0]]]
    after = [block for rank in runs[name] for block in rank["blocks"][: taken[1]]]
    assert len(set(before) | set(after)) == len(before) + len(after) == 32
    assert set(before) | set(after) <= set(range(NUM_BLOCKS))
    again = [block for rank in runs[f"{source}, again"] for block in rank["blocks"][: 8 // len(runs[source])]]
    assert sorted(again) == sorted(after)


def test_the_next_steps_of_another_world_agree_to_rounding(runs: Any, root: Path) -> None:
    straight = [row["train/loss"] for row in steps_of(root / "full4")]
    found = [row["train/loss"] for row in steps_of(root / "full4, whole")]
    np.testing.assert_allclose(found[0], straight[3], rtol=1e-4)
