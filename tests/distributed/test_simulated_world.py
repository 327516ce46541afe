"""One process that simulates a world does what rank 0 of that world does: the same samples, memory and arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_simulated import PEAK, train_watched
from world import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKS, TOKENS = 8, 32
"""Of a global batch, and of one block."""

NANO = ["model=random_llama", "model.size=nano", "evaluation.max_windows=1", "train.steps=2"]
ALL = [*NANO, "train.params=all", "sharding=zero2_master"]
CASES = {
    "whole": ALL,
    "accumulated": [*ALL, "train.micro_batch_size=1", "objective=kl", "ema.decay=0.9"],
}
SHARDED = {"full": [*NANO, "sharding=full", "train.gradient_checkpointing=true"]}
"""Beside the cases, in the world of 2: weights that are frozen, split and recomputed."""

WEIGHTS = 2 * (48 * (48 + 24 + 24 + 48) + 3 * 48 * 80) + 48 * 2048
ATTENTION = 12 * 2 * 4 * 12 * TOKENS
"""Of the model: numbers of its linears, and operations of its attention a token."""

COLLECTIVE_BYTES = 4 * (48 * 48 + 2 * 12 * 12 + 3 + 2) + 4 * 2
"""Of the rotations' one collective, which gloo's thread may hold for a while: gradients, presence, means; and these."""

WORLDS = (2, 4)
EVERY = [(world_size, name) for world_size in WORLDS for name in CASES]
Found = dict[tuple[int, str], dict[str, Any]]


def watch(cases: dict[str, list[str]], folder: Path, *, world_size: int) -> dict[str, dict[str, Any]]:
    """Return what rank 0 did in each case."""
    files = ["data=text"]
    for first, name in ((0, "calibration"), (2000, "evaluation")):
        (folder / name).write_text(" ".join(f"{number:b}" for number in range(first, first + 2000)))
        files.append(f"data.{name}={folder / name}")
    given = {name: [*overrides, *files] for name, overrides in cases.items()}
    return run_world(train_watched, given, str(folder), world_size=world_size, folder=folder)[0]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What rank 0 of every real world did."""
    cases = {2: CASES | SHARDED, 4: CASES}
    ranks = {size: watch(cases[size], tmp_path_factory.mktemp("real"), world_size=size) for size in WORLDS}
    return {(size, name): found for size in WORLDS for name, found in ranks[size].items()}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one process did in the place of each."""
    found: Found = {}
    for size in WORLDS:
        cases = {name: [*overrides, f"sharding.sim_world={size}"] for name, overrides in CASES.items()}
        alone = watch(cases, tmp_path_factory.mktemp("simulated"), world_size=1)
        found |= {(size, name): case for name, case in alone.items()}
    return found


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_it_takes_the_samples_of_rank_0(real: Found, simulated: Found, world_size: int, name: str) -> None:
    parts = simulated[world_size, name]["token_ids"]
    assert parts == real[world_size, name]["token_ids"]
    blocks = [block for part in parts for block in part]
    assert len(blocks) == 2 * BLOCKS // world_size
    assert len({tuple(block) for block in blocks}) == len(blocks)
    assert len(parts) == (2 if name == "whole" else len(blocks))


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_it_holds_the_tensors_of_rank_0(real: Found, simulated: Found, world_size: int, name: str) -> None:
    found, expected = simulated[world_size, name], real[world_size, name]
    assert 0 <= expected["peak"] - found["peak"] <= COLLECTIVE_BYTES
    assert column(found, "live") == column(expected, "live")


def test_a_larger_world_leaves_less_at_the_peak_and_between_steps(simulated: Found) -> None:
    two, four = simulated[2, "whole"], simulated[4, "whole"]
    assert four["peak"] < two["peak"]
    assert column(four, "live")[-1] < column(two, "live")[-1]


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_it_does_the_arithmetic_of_rank_0(real: Found, simulated: Found, world_size: int, name: str) -> None:
    found = column(simulated[world_size, name], "flops")
    assert found == column(real[world_size, name], "flops")
    assert 0 < found[0] < found[1]


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_it_counts_the_tokens_of_one_rank(real: Found, simulated: Found, world_size: int, name: str) -> None:
    found, expected = simulated[world_size, name], real[world_size, name]
    share = BLOCKS * TOKENS // world_size
    assert column(found, "train/tokens") == [share, 2 * share]
    assert column(expected, "train/tokens") == [BLOCKS * TOKENS, 2 * BLOCKS * TOKENS]
    for row in (*found["steps"], *expected["steps"]):
        assert row["throughput/tokens_per_s_per_device"] * row["time/step_s"] == pytest.approx(share)
    assert column(found, "throughput/tokens_per_s") == column(found, "throughput/tokens_per_s_per_device")
    train = found["summary"]["train"]
    assert found["summary"]["throughput"]["tokens_per_s"] * train["seconds"] == pytest.approx(2 * share)
    assert train["device_hours"] == pytest.approx(train["seconds"] / 3600)


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_utilization_is_that_of_a_ranks_share_whether_real_or_not(
    real: Found, simulated: Found, world_size: int, name: str
) -> None:
    flops = (6 * WEIGHTS + ATTENTION) * BLOCKS * TOKENS // world_size
    for found in (real[world_size, name], simulated[world_size, name]):
        assert_utilized(found, flops)


def test_utilization_does_not_depend_on_sharding_and_recomputation(real: Found) -> None:
    assert_utilized(real[2, "full"], (4 * WEIGHTS + ATTENTION) * BLOCKS * TOKENS // 2)


def assert_utilized(found: dict[str, Any], flops: int) -> None:
    """Compare with the operations of a step on one device, whose peak the ranks take for `PEAK`."""
    for row in found["steps"]:
        assert row["throughput/mfu_pct"] == pytest.approx(100 * flops / row["time/step_s"] / PEAK)
    mean = 100 * flops * 2 / found["summary"]["train"]["seconds"] / PEAK
    assert found["summary"]["throughput"]["mfu_pct"] == pytest.approx(mean)


def column(found: dict[str, Any], key: str) -> list[float]:
    return [row[key] for row in found["steps"]]
