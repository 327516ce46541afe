"""The accounts of what several ranks cost more than one add up."""

import pytest

from benchmarks import facts, sharding
from benchmarks.accounts import DECODING, FEW, OPTIMIZER, PLAIN, PLAIN_FEW, STEP, UNSHARDED, WIRE


def account(seconds: dict[str, float], flops: dict[str, float]) -> sharding.Account:
    return {"seconds": seconds, "flops": flops, "bytes": {}, "waiting": 0.0, "outside": {STEP: 1.5, UNSHARDED: 1.0}}


def test_extra_processor_time_is_split_into_parts() -> None:
    # One rank: 10 s of the plain model, 5 s and 40 operations on activations, 100 on weights at 0.2 s, 1 s of steps.
    alone = account(
        {STEP: 36.0, UNSHARDED: 36.0, PLAIN: 10.0, FEW: 23.0, PLAIN_FEW: 2.0, OPTIMIZER: 1.0},
        {STEP: 190.0, UNSHARDED: 190.0, PLAIN: 50.0, FEW: 102.0, PLAIN_FEW: 2.0},
    )
    # Two: the plain model takes 2 s more and activations 1 s, 130 operations on weights at 0.3 s are done instead of
    # 200, weights are decoded, each steps, and bytes move.
    shared = account(
        {STEP: 68.0, UNSHARDED: 80.0, PLAIN: 12.0, FEW: 66.0, PLAIN_FEW: 4.0}
        | {OPTIMIZER: 2.0, WIRE: 5.0, DECODING: 3.0},
        {STEP: 220.0, UNSHARDED: 290.0, PLAIN: 50.0, FEW: 204.0, PLAIN_FEW: 4.0},
    )
    found = sharding.explain(alone, shared)
    assert found["extra"] == 32.0
    assert found["parts"] == pytest.approx(
        {
            "plain": 2.0,
            "quantizing": 1.0,
            "repeated": 30 * 0.2,
            "rotating": 130 * 0.1,
            "decoding": 3.0,
            "optimizer": 1.0,
            "wire": 5.0,
            "hooks": 0.5,
        }
    )
    assert found["explained"] == pytest.approx(31.5 / 32.0)
    assert "| 98 % " in facts.markdown(sharding.account_table([{"variant": "w4a4", "account": found}]))


def test_the_limit_has_neither_rotations_nor_an_optimizer() -> None:
    flops = {STEP: 50.0, UNSHARDED: 50.0, PLAIN: 50.0, FEW: 2.0, PLAIN_FEW: 2.0}
    tokens = {FEW: 1.0, PLAIN_FEW: 1.0}
    alone = account({STEP: 10.0, UNSHARDED: 10.0, PLAIN: 10.0} | tokens, flops)
    shared = account({STEP: 30.0, UNSHARDED: 11.0, PLAIN: 11.0, WIRE: 9.0, DECODING: 0.0} | tokens, flops)
    found = sharding.explain(alone, shared)
    assert found["explained"] == pytest.approx(10.5 / 20.0)
    assert "MISSED" in facts.markdown(sharding.account_table([{"variant": "limit", "account": found}]))
