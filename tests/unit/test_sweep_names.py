"""A job's name is a function of its axes alone, differs where they differ, and is safe everywhere."""

import itertools
import re

import pytest

from rotexp.sweep.names import LONGEST, axes_of, job_name

FORBIDDEN = set("= ,{}%#$/\\'\"[]():*?<>|&;!~\t\n")


def test_a_name_reads_like_its_axes() -> None:
    axes = {"sharding": "full", "sync_mode": "universal", "optimizer.lr": "0.1"}
    assert job_name(axes) == "sharding-full__sync_mode-universal__optimizer.lr-0.1"
    assert job_name({"train.steps": "-1"}) == "train.steps--1"


@pytest.mark.parametrize(
    "value",
    [
        "a=b",
        "a,b",
        "{x: 1}",
        "100%",
        "#1",
        "${seed}",
        "a b",
        "/data/models/x",
        "[1,2]",
        "null",
        "'quoted x'",
        "ä",
        "",
        "__",
    ],
)
def test_names_are_clean_whatever_the_value(value: str) -> None:
    name = job_name({"model.path": value, "seed": "1"})
    assert not FORBIDDEN & set(name)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)


def test_values_that_look_alike_when_cleaned_keep_names_apart() -> None:
    values = ["a b", "a=b", "a/b", "a-b", "a_b", "a,b", "a__b", "a", "a-", "-a", "", "1", "1.0", "${a}", "{a}"]
    names = {job_name({"x": value}) for value in values}
    assert len(names) == len(values)
    pairs = [{"x": one, "y": other} for one, other in itertools.product([*values, "a__y-a"], repeat=2)]
    assert len({job_name(pair) for pair in pairs}) == len(pairs)


def test_long_names_are_cut_and_stay_apart() -> None:
    axes = {f"group.some_key_{number}": "value" for number in range(20)}
    names = [job_name(axes | {"seed": str(seed)}) for seed in range(3)]
    assert len(set(names)) == 3
    assert {len(name) for name in names} == {LONGEST}
    assert all(name.startswith("group.some_key_0-value__group.some_key_1-value") for name in names)


def test_the_same_axes_have_the_same_name_and_none_have_one_too() -> None:
    assert job_name({"a": "x y"}) == job_name({"a": "x y"})
    assert job_name({}) == "single"
    assert not job_name({".hidden": "1"}).startswith(".")


def test_axes_are_what_the_sweep_varies_of_a_jobs_overrides() -> None:
    overrides = ["model=tiny", "+train.steps=2", "seed=1", "data.path=a=b"]
    assert axes_of(overrides, ["seed", "train.steps", "data.path", "seed", "absent"]) == {
        "seed": "1",
        "train.steps": "2",
        "data.path": "a=b",
    }
