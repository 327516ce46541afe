"""The accounts of what several ranks cost more than one add up."""

import pytest

from benchmarks import facts, sharding
from benchmarks.accounts import OPTIMIZER, PLAIN, STEP, UNSHARDED, WIRE


def account(seconds: dict[str, float], flops: dict[str, float]) -> sharding.Account:
    return {"seconds": seconds, "flops": flops, "bytes": {}, "waiting": 0.0, "outside": {STEP: 1.5, UNSHARDED: 1.0}}


def test_extra_processor_time_is_split_into_parts() -> None:
    # One rank: 10 s of the plain model, 100 operations on weights at 0.2 s each, 1 s of optimizer.
    alone = account(
        {STEP: 31.0, UNSHARDED: 31.0, PLAIN: 10.0, OPTIMIZER: 1.0}, {STEP: 150.0, UNSHARDED: 150.0, PLAIN: 50.0}
    )
    # Two: the plain model takes 2 s more, 130 operations at 0.3 s are done instead of 200, each steps, and bytes move.
    shared = account(
        {STEP: 60.0, UNSHARDED: 74.0, PLAIN: 12.0, OPTIMIZER: 2.0, WIRE: 5.0},
        {STEP: 180.0, UNSHARDED: 250.0, PLAIN: 50.0},
    )
    found = sharding.explain(alone, shared)
    assert found["extra"] == 29.0
    assert found["parts"] == pytest.approx(
        {"plain": 2.0, "repeated": 30 * 0.2, "rotating": 130 * 0.1, "optimizer": 1.0, "wire": 5.0, "hooks": 0.5}
    )
    assert found["explained"] == pytest.approx(27.5 / 29.0)
    assert "| 95 % " in facts.markdown(sharding.account_table([{"variant": "w4a4", "account": found}]))


def test_the_limit_has_neither_rotations_nor_an_optimizer() -> None:
    flops = {STEP: 50.0, UNSHARDED: 50.0, PLAIN: 50.0}
    alone = account({STEP: 10.0, UNSHARDED: 10.0, PLAIN: 10.0}, flops)
    shared = account({STEP: 30.0, UNSHARDED: 11.0, PLAIN: 11.0, WIRE: 9.0}, flops)
    found = sharding.explain(alone, shared)
    assert found["explained"] == pytest.approx(10.5 / 20.0)
    assert "MISSED" in facts.markdown(sharding.account_table([{"variant": "limit", "account": found}]))
