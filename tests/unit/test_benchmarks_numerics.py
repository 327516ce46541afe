"""What exact numerics cost: how samples become figures, and that both modes are measured on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import facts, numerics


def found(wall: list[float], processor: list[float], received: float) -> dict[str, Any]:
    samples = [{"wall": w, "processor": p} for w, p in zip(wall, processor, strict=True)]
    return {"samples": samples, "collectives": {"allreduce_": 2}, "bytes": {}, "received_bytes": received}


def test_searching_steps_count_a_tenth() -> None:
    # A step that searches takes 12 s, plain ones 2, 2 and 4.
    assert numerics._amortized([100.0, 112.0, 114.0, 116.0, 120.0]) == pytest.approx((9 * 2.0 + 12.0) / 10)


def test_processor_seconds_are_of_all_ranks_and_ratios_of_rounds() -> None:
    first = {"fast": found([2.0, 20.0], [1.0, 10.0], 2**20), "exact": found([2.2, 22.0], [2.0, 20.0], 2**21)}
    other = {"fast": found([9.0, 9.0], [3.0, 30.0], 0.0), "exact": found([9.0, 9.0], [4.0, 40.0], 0.0)}
    row = {"model": "nano", "ranks": 4, "sharding": "full", **numerics.compare([first, other])}
    assert row["fast"]["processor"] == [4.0, 40.0]
    assert row["wall_ratio"]["median"] == pytest.approx(1.1)
    assert row["processor_ratio"]["median"] == pytest.approx(1.5)
    text = facts.markdown(numerics.table([row]))
    assert "MISSED" in text, "processors took 1.5 times as much"
    assert "1.0 → 2.0" in text
    assert "2 → 2" in text


def test_both_modes_are_measured_on_one_rank_and_on_two(tmp_path: Path) -> None:
    output = tmp_path / "numerics.json"
    size = ["--models", "nano", "--ranks", "1", "2", "--batch", "4", "--tokens", "16"]
    once = ["--steps", "1", "--repetitions", "1", "--threads", "1"]
    numerics.main([*size, *once, "--output", str(output)])
    alone, shared = facts.read_json(output)["figures"]["numerics"]
    assert (alone["sharding"], shared["sharding"]) == ("no_shard", "full")
    for row in (alone, shared):
        for mode in numerics.MODES:
            assert row[mode]["wall"][0] > 0.0
            assert row[mode]["processor"][0] > 0.0
    assert alone["fast"]["collectives"] == alone["exact"]["collectives"] == {}
    fast, exact = (shared[mode]["collectives"] for mode in numerics.MODES)
    assert fast["allreduce_"] >= 1
    assert "alltoall_base_" in exact, "sums of micro-batches travel in parts"
    assert exact["_allgather_base_"] > 0
    assert shared["exact"]["received_bytes"] > shared["fast"]["received_bytes"], "no codes are gathered"
