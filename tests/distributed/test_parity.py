"""At default rates: the first step, and any step from one checkpoint, is the same in every world, up to rounding.

Over several steps of their own two worlds part, since a last bit flips a 4-bit rounding now and then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_experiment import run_experiments, run_with_unequal_threads
from world import run_world

pytestmark = pytest.mark.slow

VARIANTS = {
    "": [],
    ", accumulated": ["train.micro_batch_size=1"],
    ", checkpointed": ["train.gradient_checkpointing=true"],
    ", accumulated, checkpointed": ["train.micro_batch_size=1", "train.gradient_checkpointing=true"],
}
STRATEGIES = {
    1: {"one": []},
    2: {"no_shard": [], "full": ["sync_mode=universal"], "zero2": []},
    4: {
        "no_shard": [],
        "full": [],
        "zero2": [],
        "hybrid": ["sync_mode=selective"],
        "hybrid_zero2": ["sync_mode=event"],
    },
}
CASES: dict[int, dict[str, list[str]]] = {
    world_size: {
        strategy + suffix: [*([] if strategy == "one" else [f"sharding={strategy}"]), *sync_mode, *variant]
        for strategy, sync_mode in strategies.items()
        for suffix, variant in VARIANTS.items()
    }
    for world_size, strategies in STRATEGIES.items()
}
CASES[2] |= {
    "full, small parameters whole": ["sharding=full", "sharding.min_shard_size=1000"],
    "full, bf16": ["sharding=full", "sharding.precision=bf16"],
    "full, prefetched": ["sharding=full", "sharding.forward_prefetch=1", "sharding.backward_prefetch=2"],
}
CASES[4] |= {
    "full, resharded to 2": ["sharding=full", "sharding.reshard_after_forward=2"],
    "learned_r4, hybrid": ["sharding=hybrid", "rotation=learned_r4"],
}
EVERY_CASE = [(world_size, name) for world_size, cases in CASES.items() for name in cases]
RESUMED = {
    2: ["no_shard", "full", "zero2", "full, accumulated, checkpointed"],
    4: ["no_shard", "full", "zero2", "hybrid", "hybrid_zero2", "hybrid, accumulated, checkpointed"],
}
"""The cases that also take the third step, from the checkpoint of one process after two."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Every case's results, by rank."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    root = tmp_path_factory.mktemp("parity")
    halfway = root / "world1" / "one" / "checkpoints" / "step-00000002"
    for world_size, cases in CASES.items():
        folder = root / f"world{world_size}"
        folder.mkdir()
        nano = {name: ["model=random_llama", *overrides] for name, overrides in cases.items()}
        if world_size == 1:
            nano["one"] += ["train.checkpoint_every=2"]
            nano["one, r4"] = ["model=random_llama", "rotation=learned_r4"]
        for name in RESUMED.get(world_size, []):
            nano[f"{name}, resumed"] = [*nano[name], f"resume={halfway}"]
        ranks = run_world(run_experiments, nano, str(folder), world_size=world_size, folder=folder)
        found |= {(world_size, name): [rank[name] for rank in ranks] for name in nano}
    return found


EXACT = [case for case in EVERY_CASE if "bf16" not in case[1]]


def assert_same_step(found: dict[str, Any], expected: dict[str, Any], *, step: int) -> None:
    """Compare the first step of one run with a step of another."""
    mine, wanted = found["rows"][0], expected["rows"][step - 1]
    assert mine["step"] == wanted["step"] == step
    np.testing.assert_allclose(mine["train/loss"], wanted["train/loss"], rtol=1e-5)
    np.testing.assert_allclose(mine["grad_norm/total"], wanted["grad_norm/total"], rtol=1e-4)
    after, matrices = found["stepped"][0], expected["stepped"][step - 1]
    assert after.keys() == matrices.keys()
    for rotation, matrix in matrices.items():
        np.testing.assert_allclose(after[rotation], matrix, atol=1e-5)


@pytest.mark.parametrize(("world_size", "name"), EXACT)
def test_the_first_step_equals_one_process(results: Any, world_size: int, name: str) -> None:
    expected = results[1, "one, r4" if "r4" in name else "one"][0]
    for found in results[world_size, name]:
        assert_same_step(found, expected, step=1)


@pytest.mark.parametrize(
    ("world_size", "name"), [(world_size, name) for world_size, names in RESUMED.items() for name in names]
)
def test_a_step_from_one_checkpoint_equals_one_process(results: Any, world_size: int, name: str) -> None:
    expected = results[1, "one"][0]
    for found in results[world_size, f"{name}, resumed"]:
        assert_same_step(found, expected, step=3)
        trained, wanted = (run["summary"]["evaluation"]["trained"]["perplexity"] for run in (found, expected))
        assert trained == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(("world_size", "name"), [case for case in EVERY_CASE if case[0] > 1])
def test_replicas_stay_identical_whatever_their_threads_and_seeds(results: Any, world_size: int, name: str) -> None:
    first = results[world_size, name][0]
    assert [found["threads"] for found in results[world_size, name]] == [1, 2] * (world_size // 2)
    for found in results[world_size, name]:
        assert found["divergence"] == 0.0
        assert found["rows"][-1]["replica/max_abs_diff"] == 0.0
        assert [row["grad_norm/total"] for row in found["rows"]] == [row["grad_norm/total"] for row in first["rows"]]


SOLVED = ", solved"
WIDE = {
    f"{strategy}{kind}": [
        f"sharding={strategy}",
        "model=tiny",
        "metrics.on_divergence=log",
        "metrics.divergence_every=1",
        *rate,
    ]
    for strategy in ("no_shard", "full")
    for kind, rate in (("", []), (SOLVED, ["optimizer.lr=2.0"]))
}
"""R1 has order 192: from about 160 on the number of threads decides the last bits of a solve, which long steps take."""


def test_wide_rotations_stay_identical_since_ranks_step_by_equal_threads(tmp_path: Path) -> None:
    for name, function in (("equal", run_experiments), ("unequal", run_with_unequal_threads)):
        folder = tmp_path / name
        folder.mkdir()
        for place, rank in enumerate(run_world(function, WIDE, str(folder), world_size=2, folder=folder)):
            for strategy, found in rank.items():
                assert found["threads"] == 1 + place
                assert found["rotations"]["R1"].shape == (192, 192)
                parting = name == "unequal" and strategy.endswith(SOLVED)
                differs = [row["replica/max_abs_diff"] > 0 for row in found["rows"]]
                assert differs == [parting] * 3, (name, strategy)
                assert (found["divergence"] > 0) is parting


def test_mixed_precision_changes_the_numbers_but_not_the_model(results: Any) -> None:
    mixed, exact = results[2, "full, bf16"][0], results[1, "one"][0]
    losses, wanted = ([row["train/loss"] for row in run["rows"]] for run in (mixed, exact))
    np.testing.assert_allclose(losses, wanted, rtol=2e-2)
    assert losses != wanted
    assert all(matrix.dtype == np.float32 for matrix in mixed["rotations"].values())


def test_the_rotations_move(results: Any) -> None:
    assert results[1, "one"][0]["rows"][-1]["rotation/distance_from_init"] > 3e-4


@pytest.mark.parametrize(("world_size", "name"), [case for case in EXACT if case[0] > 1])
def test_held_out_figures_equal_one_process(results: Any, world_size: int, name: str) -> None:
    expected = results[1, "one, r4" if "r4" in name else "one"][0]["summary"]["evaluation"]
    found = results[world_size, name][0]["summary"]["evaluation"]
    for row in ("float", "quantized", "hadamard"):
        assert found[row]["perplexity"] == pytest.approx(expected[row]["perplexity"], rel=1e-6)


def test_one_gradient_collective_a_step(results: Any) -> None:
    """A step issues the gradients' all-reduce and the memory's; the last one adds the divergence digest.

    Only `full` may exchange own rows of divided weights on top, as many in every step: see test_communication.
    """
    for (world_size, name), ranks in results.items():
        if "resumed" in name:
            continue
        first, *later = [row["comm/num_collectives"] for row in ranks[0]["rows"]]
        assert later == ([0, 0] if world_size == 1 else [first + 1, first + 2]), (world_size, name)
        assert first == min(world_size - 1, 1) or name.startswith("full"), (world_size, name)


@pytest.mark.parametrize(
    ("world_size", "name", "mesh", "reduction"),
    [(2, "full", [2], 2), (4, "full", [4], 4), (4, "hybrid", [2, 2], 2), (2, "no_shard", [], 1)],
)
def test_effective_sharding_is_read_back(results: Any, world_size: int, name: str, mesh: Any, reduction: int) -> None:
    effective = results[world_size, name][0]["summary"]["sharding"]["effective"]
    assert effective["mesh"] == mesh
    assert effective["ignored"] == 3
    assert effective["replicated" if mesh else "sharded"] == 0
    assert effective["bytes_full"] / effective["bytes_local"] == pytest.approx(reduction, rel=0.01)


def test_small_parameters_stay_whole(results: Any) -> None:
    effective = results[2, "full, small parameters whole"][0]["summary"]["sharding"]["effective"]
    assert effective["replicated"] == 5  # the norms' gains
    assert effective["sharded"] == 16


def test_the_guard_counts_and_changes_nothing(results: Any) -> None:
    guarded = results[2, "full"][0]
    sync = guarded["summary"]["sync"]
    assert sync["num_groups"] == 5
    assert sync["groups"] == {"random_llama-nano": 5}
    assert sync["num_barriers"] == sum(sync["num_unshards"].values()) > 0
    for rotation, matrix in results[2, "full, prefetched"][0]["rotations"].items():
        np.testing.assert_array_equal(guarded["rotations"][rotation], matrix)
