"""Reading runs: every one is found once, whatever became of it, and what cannot be read is named."""

import json
import math
from pathlib import Path

import pytest
from report_runs import make_run, phase_rows, step_row, summary

from rotexp.comparison.collect import collect
from rotexp.comparison.figures import FIGURES
from rotexp.comparison.find import read_runs
from rotexp.comparison.runs import Run, read_run


def names(*folders: Path) -> list[str]:
    return [run.name for run in read_runs(folders, complain=pytest.fail)]


def figure(run: Run, key: str) -> float | None:
    return next(figure for figure in FIGURES if figure.key == key).value(run)


def read(folder: Path) -> Run:
    return read_run(folder, name=folder.name)


def test_runs_are_found_at_any_depth_and_only_once(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "a")
    make_run(tmp_path / "sweep" / "deep" / "er" / "b")
    make_run(tmp_path / "alone")
    for of_a_run in ("checkpoints", "wandb", ".aside"):
        make_run(tmp_path / "alone" / of_a_run / "copy")
    assert names(tmp_path / "sweep", tmp_path / "sweep" / "a", tmp_path / "alone") == [
        "alone",
        "sweep/a",
        "sweep/deep/er/b",
    ]
    assert names(tmp_path / "alone") == ["alone"]


def test_jobs_that_left_no_run_are_not_lost(tmp_path: Path) -> None:
    make_run(tmp_path / "sharding_full", sharding__strategy="full")
    make_run(tmp_path / "sharding_no_shard")
    jobs = [
        {"name": "sharding_full", "axes": {"sharding": "full"}, "status": "done", "error": None},
        {
            "name": "sharding_zero3",
            "axes": {"sharding": "zero3"},
            "folder": None,
            "status": "refused",
            "error": "no such",
        },
        {"name": "sharding_zero2", "axes": {"sharding": "zero2"}, "folder": None, "status": "not started"},
        "damage",
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    report = collect([tmp_path], command="")
    (axis,) = report.axes
    assert [(run.name, run.status, run.error, axis.of(run)) for run in report.runs] == [
        ("sharding_full", "done", "", "full"),
        ("sharding_no_shard", "done", "", "no_shard"),
        ("sharding_zero2", "not started", "", "zero2"),
        ("sharding_zero3", "refused", "no such", "zero3"),
    ]
    assert report.settings[3] == "sharding=zero3"
    assert [run.command == "" for run in report.runs] == [False, False, True, True]
    moved = [{"name": "sharding full", "axes": {}, "folder": str(tmp_path / "sharding_full"), "status": "done"}]
    (tmp_path / "jobs.json").write_text(json.dumps(moved))
    assert "sharding full" not in [run.name for run in collect([tmp_path], command="").runs]
    (tmp_path / "jobs.json").write_text("[{")
    (note,) = collect([tmp_path], command="").notes
    assert note.startswith(f"{tmp_path.name}: jobs.json cannot be read (")


def test_a_folder_that_is_none_or_holds_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone: no such folder; name the folder of a run or of a sweep"):
        names(tmp_path / "gone")
    with pytest.raises(ValueError, match="holds no run"):
        names(tmp_path)


@pytest.mark.parametrize("status", ["running", "failed", "oom", "interrupted"])
def test_a_run_that_did_not_end_well_shows_what_it_logged(tmp_path: Path, status: str) -> None:
    end = {"status": status, "error": "phase train:\n  it broke"}
    rows = [*phase_rows(), step_row(1), step_row(2, **{"memory/peak_rss_gib_max": 3.5})]
    run = read(make_run(tmp_path / "run", end=end, rows=rows))
    assert (run.status, run.error, run.problems) == (status, "phase train: it broke", [])
    assert figure(run, "eval/float/perplexity") == 26.0
    assert figure(run, "eval/trained/perplexity") is None
    assert figure(run, "train_seconds") == 1.0
    assert figure(run, "seconds") == 1.25
    assert figure(run, "steps") == 2
    assert figure(run, "peak_memory") == 3.5
    assert figure(run, "throughput/tokens_per_s") == 4096.0


def test_a_finished_run_shows_its_end_state(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", end=summary(perplexity=29.5, world_size=4)))
    assert (run.status, run.error, run.remark) == ("done", "", "")
    assert figure(run, "eval/trained/perplexity") == 29.5
    assert figure(run, "seconds") == 2.25
    assert figure(run, "device_hours") == pytest.approx(4 * 2.25 / 3600)
    assert figure(run, "train/device_hours") == pytest.approx(4 * 2.0 / 3600)
    assert figure(run, "peak_memory") == 1.5
    assert run.memory["load"] == {"peak_rss_gib_max": 0.75, "peak_rss_gib_min": 0.5}


def test_memory_of_an_allocator_counts_before_the_resident_set(tmp_path: Path) -> None:
    end = summary(memory={"train": {"peak_rss_gib_max": 9.0, "peak_allocated_gib_max": 4.0}})
    assert figure(read(make_run(tmp_path / "run", end=end)), "peak_memory") == 4.0


def test_ranks_of_a_run_without_an_end_are_counted_by_their_logs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", end={"status": "failed", "error": "x"}, rows=[])
    for rank in range(3):
        (folder / f"rank-{rank}.log").touch()
    assert figure(read(folder), "world_size") == 3


def test_a_run_that_goes_on_says_when_it_last_wrote(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", end={"status": "running", "error": None}))
    assert run.remark == f"last written {run.written:%Y-%m-%d %H:%M} UTC"


def test_steps_logged_again_after_resuming_count_once(tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2, loss=9.0), step_row(3), step_row(2, loss=2.25), step_row(3, loss=2.0)]
    run = read(make_run(tmp_path / "run", rows=rows))
    assert run.points["train/loss"] == {1: 2.5, 2: 2.25, 3: 2.0}
    assert run.clock == {1: 0.5, 2: 1.0, 3: 1.5}


def test_time_counts_steps_between_logged_ones(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", rows=[step_row(10), step_row(20)]))
    assert run.clock == {10: 5.0, 20: 10.0}


def test_numbers_that_are_not_finite_are_read_as_such(tmp_path: Path) -> None:
    rows = [step_row(1, loss="nan"), step_row(2, loss="-inf"), step_row(3, loss="great"), step_row(4, loss=True)]
    run = read(make_run(tmp_path / "run", end=summary(perplexity="inf"), rows=rows))
    assert figure(run, "eval/trained/perplexity") == math.inf
    losses = run.points["train/loss"]
    assert math.isnan(losses[1])
    assert (losses[2], set(losses)) == (-math.inf, {1, 2})


def test_a_line_that_was_cut_off_is_named_and_the_others_count(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    file = folder / "metrics.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:-1]) + whole[-1][:20])
    run = read(folder)
    assert run.problems == [f"metrics.jsonl: line {len(whole)} of {len(whole)} cannot be read; the others are shown"]
    assert list(run.points["train/loss"]) == [1, 2, 3, 4]


def test_lines_that_hold_something_else_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rows=[step_row(1)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n{"step": "two"}\n')
    problem = "metrics.jsonl: 3 lines, the first is line 2 of 4 cannot be read; the others are shown"
    assert read(folder).problems == [problem]


@pytest.mark.parametrize("text", ['{"status": "do', "[]", "", "\x00"])
def test_a_damaged_summary_is_a_run_all_the_same(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").write_text(text)
    run = read(folder)
    assert run.status == "unreadable"
    assert run.error.startswith("summary.json cannot be read (")
    assert run.problems == [run.error]
    assert figure(run, "eval/float/perplexity") == 26.0


def test_summaries_with_odd_values_do_not_break_a_report(tmp_path: Path) -> None:
    end = {"evaluation": None, "train": [], "memory": 3, "world_size": "two"}
    run = read(make_run(tmp_path / "run", end=end))
    assert (run.status, run.error) == ("unreadable", "summary.json says no status")
    assert {figure.key: figure.value(run) for figure in FIGURES}["eval/trained/perplexity"] is None


def test_a_configuration_that_is_damaged_or_gone_is_named(tmp_path: Path) -> None:
    damaged, gone = make_run(tmp_path / "damaged"), make_run(tmp_path / "gone")
    (damaged / "config.resolved.yaml").write_text("a: [1")
    (gone / "config.resolved.yaml").unlink()
    (first,), (second,) = read(damaged).problems, read(gone).problems
    assert first.startswith("config.resolved.yaml cannot be read (")
    assert second == "config.resolved.yaml cannot be read (No such file or directory)"


def test_the_command_that_repeats_a_run_survives_a_shell(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "a run's"))
    quoted = "'" + str(tmp_path / "a run's").replace("'", "'\"'\"'") + "'"
    assert run.command == f"python -m rotexp.train --config-dir {quoted} --config-name config.resolved"


def test_configurations_are_read_as_plain_values(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", optimizer__lr=1e-05))
    assert (run.config["optimizer.lr"], run.config["model.path"], run.config["rotation.learned"]) == (1e-5, None, True)
    assert not any(key.startswith("defaults") for key in run.config)
    assert json.dumps(run.config)
