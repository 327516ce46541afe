"""Ranks that rotate and quantize their own rows train as ranks that do so with whole weights, and as one rank alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from ranks_own_rows import ROTATION, Case, train_all
from world import run_world

from rotexp.quant.spec import QuantSpec
from rotexp.rotation.options import RotationConfig
from rotexp.sharding.options import Precision

pytestmark = pytest.mark.slow

HIDDEN, INNER, KEYS, HEAD, LAYERS = 48, 56, 24, 12, 2
BLOCKS = RotationConfig(r1=True, r2=True, r3=None, r4=True, block_size=4, init=ROTATION.init)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MXFP4 = QuantSpec(_target_="mxfp4.MXFP4", group_size=32)
CASES: dict[int, dict[str, Case]] = {
    2: {
        "full": Case(accumulated=2, checkpointed=True),
        "zero2": Case(strategy="zero2", refreshed=True),
        "w4a4": Case(activations=QuantSpec(4, symmetric=False), wire=500, distilled=True),
        "asymmetric": Case(weights=QuantSpec(4, symmetric=False, clip_ratio=0.9)),
        "nf4": Case(weights=QuantSpec(_target_="nf4.NF4", group_size=8, clip_search=True)),
        "mxfp4": Case(options=WIDE, weights=MXFP4, activations=MXFP4),
        "bf16": Case(sharding={"precision": Precision.bf16}),
    },
    4: {
        "full": Case(),
        "full, own rows": Case(rotation=dataclasses.replace(ROTATION, r2=False), wire=500),
        "hybrid": Case(strategy="hybrid"),
        "hybrid_zero2": Case("llama with biases", strategy="hybrid_zero2"),
        "groups": Case(weights=QuantSpec(4, group_size=8), strategy="zero2"),
        "fused": Case("phi3"),
        "blocks": Case(rotation=BLOCKS),
        "uneven": Case(options={"intermediate_size": 57}, sharding={"min_shard_size": 1500}),
        "resharded to 2": Case(sharding={"reshard_after_forward": 2}),
    },
}
EVERY = [(size, name) for size, cases in CASES.items() for name in cases]
EXACT = [case for case in EVERY if case[1] != "bf16"]
WHOLE = [
    (2, "full"),
    (2, "zero2"),
    (2, "w4a4"),
    (2, "nf4"),
    (2, "mxfp4"),
    (2, "bf16"),
    (4, "full, own rows"),
    (4, "hybrid_zero2"),
]
"""The cases that are also trained on whole weights."""

Found = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Found]]]:
    """What every rank found in every case, by world size and rank; `NAME, whole` is the same, not divided."""
    found = {}
    for size, cases in CASES.items():
        also = [name for whole, name in WHOLE if whole == size]
        wholes = {f"{name}, whole": dataclasses.replace(cases[name], divided=False) for name in also}
        folder = tmp_path_factory.mktemp(f"world{size}")
        found[size] = run_world(train_all, cases | wholes, world_size=size, folder=folder)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Found]:
    """What one rank finds that does the whole batch of a case at once."""
    changes: dict[str, Any] = {"strategy": "no_shard", "sharding": {}, "accumulated": 1}
    cases = {case: dataclasses.replace(CASES[case[0]][case[1]], **changes) for case in EXACT}
    ranks: list[Any] = run_world(train_all, cases, world_size=1, folder=tmp_path_factory.mktemp("alone"))
    found: dict[tuple[int, str], Found] = ranks[0]
    return found


def assert_same_training(found: Found, expected: Found) -> None:
    """Compare steps at the default rate, each from rotations of its own."""
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    for gradients, wanted in zip(found["gradients"], expected["gradients"], strict=True):
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            np.testing.assert_allclose(gradients[name], gradient, atol=1e-5 * np.abs(gradient).max())
    for stepped, wanted in zip(found["stepped"], expected["stepped"], strict=True):
        for name, matrix in wanted.items():
            np.testing.assert_allclose(stepped[name], matrix, atol=1e-5)


@pytest.mark.parametrize(("size", "name"), [case for case in WHOLE if case in EXACT])
def test_it_trains_as_whole_weights_do(results: Any, size: int, name: str) -> None:
    assert_same_training(results[size][0][name], results[size][0][f"{name}, whole"])


@pytest.mark.parametrize(("size", "name"), EXACT)
def test_it_trains_as_one_rank_does(results: Any, alone: Any, size: int, name: str) -> None:
    assert_same_training(results[size][0][name], alone[size, name])


@pytest.mark.parametrize(("size", "name"), EVERY)
def test_replicas_stay_identical(results: Any, size: int, name: str) -> None:
    first = results[size][0][name]
    for rank in results[size]:
        assert rank[name]["losses"] == first["losses"]
        assert rank[name]["divergence"] == 0.0
        for rotation, matrix in first["rotations"].items():
            np.testing.assert_array_equal(rank[name]["rotations"][rotation], matrix)


@pytest.mark.parametrize(("size", "name"), EXACT)
def test_weights_are_themselves_afterwards(results: Any, alone: Any, size: int, name: str) -> None:
    expected = alone[size, name]
    for rank in results[size]:
        assert rank[name]["frozen"]
        np.testing.assert_allclose(rank[name]["float"], expected["float"], atol=1e-5)
        assert np.abs(rank[name]["quantized"] - expected["quantized"]).mean() < 1e-3
        assert np.abs(rank[name]["quantized"] - rank[name]["float"]).mean() > 1e-2


def test_mixed_precision_rounds_gradients_otherwise(results: Any) -> None:
    found, whole = results[2][0]["bf16"], results[2][0]["bf16, whole"]
    np.testing.assert_allclose(found["losses"], whole["losses"], rtol=1e-2)
    for name, gradient in whole["gradients"][0].items():
        difference = np.abs(found["gradients"][0][name] - gradient).max()
        assert 0.0 < difference <= 1e-2 * np.abs(gradient).max()


@pytest.mark.parametrize(
    ("size", "name", "count"),
    [
        (2, "full", 14),
        (2, "w4a4", 10),  # where bytes are dear, rows are not exchanged for columns: not for what writes the stream
        (2, "nf4", 14),
        (2, "mxfp4", 14),
        (4, "full", 14),
        (4, "full, own rows", 10),
        (4, "fused", 8),
        (4, "uneven", 4),  # queries and output: 57 is read or written by three, keys and values are small
        (4, "resharded to 2", 0),
    ],
)
def test_what_is_divided(results: Any, size: int, name: str, count: int) -> None:
    assert [rank[name]["weights"] for rank in results[size]] == [count] * size


OWN_ROWS = HIDDEN * (HIDDEN + 2 * KEYS + 2 * INNER)
"""Weights of a layer's linears that read the residual stream, whose rows are rotated each by itself without R2."""


def test_a_layer_gathers_bytes_and_reduces_once(results: Any) -> None:
    """Forward and backward gather a byte instead of four for each weight, and four more for each row."""
    found, whole = (results[4][0][f"full, own rows{suffix}"] for suffix in ("", ", whole"))
    rows = HIDDEN + 2 * KEYS + 2 * INNER
    saved = 2 * LAYERS * (3 * OWN_ROWS - 4 * rows)
    assert whole["bytes"]["_allgather_base_"] - found["bytes"]["_allgather_base_"] == saved
    assert found["collectives"]["_allgather_base_"] == whole["collectives"]["_allgather_base_"]
    assert found["collectives"]["_reduce_scatter_base_"] == LAYERS
    assert found["bytes"]["_reduce_scatter_base_"] == LAYERS * 4 * OWN_ROWS
    assert set(whole["collectives"]) == {"_allgather_base_"}


def test_products_are_divided_by_the_ranks(results: Any) -> None:
    """Whole, each rank rotates forward and backward and derives the gradient; divided, its rows forward, and theirs."""
    found, whole = (results[4][0][f"full, own rows{suffix}"] for suffix in ("", ", whole"))
    products = 2 * LAYERS * OWN_ROWS * HIDDEN
    assert whole["flops"] - found["flops"] == 3 * products - 2 * products // 4


def test_rows_are_exchanged_for_columns_and_back(results: Any) -> None:
    """Each exchange moves a rank's share of a weight: two forward, and backward one of two weights, and one back."""
    found = results[4][0]["full"]
    assert found["collectives"]["alltoall_base_"] == LAYERS * (
        4 + 4 + 3
    )  # values, output, down; down's ends in columns
    values, output, down = KEYS * HIDDEN, HIDDEN * HIDDEN, HIDDEN * INNER
    assert found["bytes"]["alltoall_base_"] == LAYERS * (5 * values + 5 * output + 4 * down) * 4 // 4
    assert results[4][0]["hybrid"]["collectives"]["allreduce_"] == LAYERS


@pytest.mark.parametrize("size", CASES)
def test_clip_ratios_of_all_rows_come_together(results: Any, alone: Any, size: int) -> None:
    ratios, expected = results[size][0]["full"]["ratios"], alone[size, "full"]["ratios"]
    assert len(ratios) == 7 * LAYERS
    for name, whole in expected.items():
        assert ratios[name].shape == whole.shape
        assert (ratios[name] == whole).mean() > 0.95  # errors that are nearly equal may change places


@pytest.mark.parametrize(("size", "name"), [(2, "full"), (4, "hybrid"), (4, "fused")])
def test_training_goes_on_from_the_clip_ratios_that_a_checkpoint_holds(results: Any, size: int, name: str) -> None:
    for rank in results[size]:
        assert rank[name]["resumed"] == rank[name]["next"]
        assert rank[name]["searched anew"] != rank[name]["next"]
