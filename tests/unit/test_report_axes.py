"""What differs between runs is said by the names people type, and no more often than needed."""

from pathlib import Path
from typing import Any

import pytest
from report_runs import PROTOCOL, make_run, summary

from rotexp.comparison.axes import find_axes, setting
from rotexp.comparison.collect import collect, differences
from rotexp.comparison.find import read_runs
from rotexp.comparison.runs import Run


def runs_with(tmp_path: Path, *changes: dict[str, Any]) -> list[Run]:
    for index, change in enumerate(changes):
        make_run(tmp_path / f"{index:02}", **change)
    return read_runs([tmp_path], complain=pytest.fail)


def labels(runs: list[Run]) -> list[str]:
    return [axis.label for axis in find_axes(runs)]


def test_an_option_is_said_by_its_group_and_not_by_what_it_sets(tmp_path: Path) -> None:
    hadamard = {"rotation": {"name": "hadamard", "learned": False}, "sharding__strategy": "full"}
    runs = runs_with(tmp_path, {}, hadamard)
    assert labels(runs) == ["rotation", "sharding"]
    assert [setting(run, find_axes(runs)) for run in runs] == [
        "rotation=learned, sharding=no_shard",
        "rotation=hadamard, sharding=full",
    ]


def test_a_key_set_beside_an_option_is_an_axis(tmp_path: Path) -> None:
    eight = {"quant": {"name": "w8a8", "weights": {"bits": 8}}}
    assert labels(runs_with(tmp_path / "a", {}, eight)) == ["quant"]
    assert labels(runs_with(tmp_path / "b", {}, eight, {"quant__weights": {"bits": 3}})) == [
        "quant",
        "quant.weights.bits",
    ]


def test_another_format_beside_an_option_is_an_axis(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {}, {"quant__weights": {"bits": 4, "_target_": "nf4.NF4"}})
    assert labels(runs) == ["quant.weights._target_"]
    assert [setting(run, find_axes(runs)) for run in runs] == ["the one setting", "quant.weights._target_=nf4.NF4"]


def test_seeds_come_last_and_make_no_setting(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {"seed": 1}, {"seed": 2}, {"seed": 1, "optimizer__lr": 0.5})
    axes = find_axes(runs)
    assert [axis.label for axis in axes] == ["optimizer.lr", "seed"]
    assert [setting(run, axes) for run in runs] == ["optimizer.lr=0.1", "optimizer.lr=0.1", "optimizer.lr=0.5"]
    assert setting(runs[0], axes[1:]) == "the one setting"


def test_how_a_run_was_recorded_is_no_axis(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {"tracker__run_name": "a"}, {"tracker__run_name": "b", "optimizer___target_": "x"})
    assert labels(runs) == []
    assert [key for key, _ in differences(runs)] == ["optimizer._target_", "tracker.run_name"]


def test_values_are_shown_as_they_are_typed(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {}, {"model__path": "a/b", "train__steps": 8, "rotation__learned": False})
    rows = dict(differences(runs))
    assert rows == {"model.path": ["null", "a/b"], "train.steps": ["4", "8"], "rotation.learned": ["true", "false"]}


def test_a_run_without_configuration_is_a_setting_of_its_own(tmp_path: Path) -> None:
    runs_with(tmp_path, {}, {"seed": 1})
    (tmp_path / "01" / "config.resolved.yaml").unlink()
    report = collect([tmp_path], command="")
    assert report.settings == ["the one setting", "01 (configuration unknown)"]
    assert report.axes == []


def test_settings_are_compared_over_the_seeds_of_finished_runs(tmp_path: Path) -> None:
    for name, lr, seed, end in [
        ("a0", 0.1, 0, summary(perplexity=30.0)),
        ("a1", 0.1, 1, summary(perplexity=31.0)),
        ("a1-again", 0.1, 1, summary(perplexity=32.0)),
        ("a2", 0.1, 2, {"status": "failed", "error": "x", "evaluation": {"trained": {"perplexity": 1.0}}}),
        ("b0", 0.2, 0, summary(perplexity="nan")),
    ]:
        make_run(tmp_path / name, end=end, optimizer__lr=lr, seed=seed)
    first, second = collect([tmp_path], command="").spreads["eval/trained/perplexity"]
    assert (first.setting, first.values, first.num_runs) == ("optimizer.lr=0.1", [30.0, 31.5], 4)
    assert (second.values, second.num_runs, second.verdict) == ([], 1, "no finished run to compare")


def test_other_texts_are_named_and_not_compared(tmp_path: Path) -> None:
    other = summary(perplexity=3.0)
    other["evaluation"]["protocol"] = PROTOCOL | {"windows": 64}
    for seed in range(2):
        make_run(tmp_path / f"a{seed}", seed=seed)
    make_run(tmp_path / "b", end=other, seed=2)
    report = collect([tmp_path], command="")
    (note,) = report.notes
    assert "one protocol, and here are 2" in note
    assert "windows 4: a0 and 1 more" in note
    assert "windows 64: b" in note
    assert report.spreads["eval/trained/perplexity"][0].values == [30.0, 30.0]
    assert len(report.spreads["train_seconds"][0].values) == 3
