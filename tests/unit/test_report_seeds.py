"""Comparison over seeds against scipy's own Welch test."""

import random

import pytest
from scipy import stats

from rotexp.comparison.seeds import compare, welch_interval


@pytest.mark.parametrize("sizes", [(2, 2), (2, 7), (5, 5)])
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_intervals_are_welchs(sizes: tuple[int, int], level: float) -> None:
    draw = random.Random(3)
    first, second = ([draw.gauss(mean, 1 + mean) for _ in range(size)] for mean, size in enumerate(sizes))
    expected = stats.ttest_ind(first, second, equal_var=False).confidence_interval(level)
    assert welch_interval(first, second, level=level) == pytest.approx(tuple(expected), rel=1e-6)


def test_one_value_has_no_interval_and_equal_values_have_an_empty_one() -> None:
    assert welch_interval([1.0], [1.0, 2.0], level=0.95) is None
    assert welch_interval([3.0, 3.0], [1.0, 1.0], level=0.95) == (2.0, 2.0)


def by_seed(*values: float) -> dict[str, list[float]]:
    return {str(seed): [value] for seed, value in enumerate(values)}


def test_a_difference_is_judged_against_the_spread() -> None:
    values = {"far": by_seed(40.0, 40.1, 39.9), "near": by_seed(30.2, 31.2, 29.8), "best": by_seed(30.0, 31.0, 29.5)}
    spreads = compare(values, dict.fromkeys(values, 3), better="lower")
    assert [(spread.setting, spread.verdict) for spread in spreads] == [
        ("best", "best"),
        ("near", "within the spread over seeds"),
        ("far", "exceeds the spread over seeds"),
    ]
    together = stats.ttest_ind([40.0, 40.1, 39.9], [30.0, 31.0, 29.5], equal_var=False).confidence_interval(0.975)
    assert spreads[2].interval == pytest.approx(tuple(together), rel=1e-6)
    assert (spreads[0].interval, spreads[0].deviation) == (None, pytest.approx(stats.tstd([30.0, 31.0, 29.5])))


def test_the_best_is_the_highest_where_more_is_better() -> None:
    values = {"slow": by_seed(1.0, 1.1), "fast": by_seed(2.0, 2.1)}
    assert [spread.setting for spread in compare(values, dict.fromkeys(values, 2), better="higher")] == ["fast", "slow"]


def test_one_seed_says_that_the_spread_is_unknown() -> None:
    values = {"lucky": by_seed(1.0), "best": by_seed(2.0, 2.1), "failed": {}}
    spreads = compare(values, {"lucky": 1, "best": 2, "failed": 3}, better="lower")
    assert [(spread.setting, spread.verdict) for spread in spreads] == [
        ("lucky", "one seed: spread unknown"),
        ("best", "best"),
        ("failed", "no finished run to compare"),
    ]
    alone = compare({"one": by_seed(1.0)}, {"one": 1}, better="lower")
    assert alone[0].verdict == "the only setting; one seed: spread unknown"
    assert alone[0].deviation is None


def test_runs_repeated_with_one_seed_are_one_value() -> None:
    (spread,) = compare({"one": {"0": [1.0, 3.0]}}, {"one": 2}, better="lower")
    assert (spread.values, spread.mean) == ([2.0], 2.0)
