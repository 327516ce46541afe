"""Tables: the exports hold every run and figure, the terminal what fits."""

import csv
import io
import json
from pathlib import Path

import pytest
from report_runs import make_run, summary
from rich.console import Console

from rotexp.comparison.collect import Report, collect
from rotexp.comparison.table import to_csv, to_json
from rotexp.comparison.terminal import parts, show_number


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Two finished runs, one of them not finite, and one that failed, with texts that tables may take as markup."""
    make_run(tmp_path / "a", end=summary(perplexity=30.125))
    make_run(tmp_path / "b", end=summary(perplexity="nan"), seed=1, model__path='[red]x,"y"')
    make_run(tmp_path / "c", end={"status": "oom", "error": "out of [bold]memory\nhere"}, seed=2, rows=[])
    return collect([tmp_path], command="")


def printed(report: Report, *, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    for part in parts(report, width=width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_csv_has_one_row_a_run_and_axes_as_columns(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [(row["run"], row["status"], row["seed"], row["model.path"]) for row in rows] == [
        ("a", "done", "0", "null"),
        ("b", "done", "1", '[red]x,"y"'),
        ("c", "oom", "2", "null"),
    ]
    assert [row["eval/trained/perplexity"] for row in rows] == ["30.125", "nan", ""]
    assert rows[2]["error"] == "out of [bold]memory here"
    assert rows[0]["command"].endswith("--config-name config.resolved")


def test_json_holds_the_same_as_numbers(report: Report) -> None:
    rows = json.loads(to_json(report))
    assert [row["eval/trained/perplexity"] for row in rows] == [30.125, "nan", None]
    assert [row["eval/trained/kl"] for row in rows] == [0.2, 0.2, None]
    assert rows[0].keys() == set(next(csv.reader(io.StringIO(to_csv(report)))))


def test_the_terminal_shows_every_run_and_what_ended_it(report: Report) -> None:
    text = printed(report, width=250)
    lines = text.splitlines()
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│ ")][:3] == ["a", "b", "c"]
    assert "c oom: out of [bold]memory here" in lines
    assert '[red]x,"y"' in text
    assert "30.12" in text
    assert "configuration differences" in text


def test_a_narrow_terminal_leaves_figures_out_and_names_them(report: Report) -> None:
    lines = printed(report, width=70).splitlines()
    assert max(map(len, lines)) <= 70
    assert any(line.startswith("no room here, but on the page:") for line in lines)
    assert not any(line.startswith("no room here") for line in printed(report, width=250).splitlines())


def test_figures_that_are_the_same_in_all_runs_stand_below(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / str(seed), end=summary(perplexity=30.0 + seed), seed=seed)
    text = " ".join(printed(collect([tmp_path], command=""), width=100).split())
    assert "the same in all: perplexity float 26, KL trained (nats) 0.2000" in text


def test_settings_of_one_seed_each_are_not_judged(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        make_run(tmp_path / str(lr), optimizer__lr=lr)
    text = printed(collect([tmp_path], command=""), width=100)
    assert "every setting has one seed: its spread is unknown" in text
    for lr in (0.1, 0.2):
        make_run(tmp_path / f"{lr}-again", optimizer__lr=lr, seed=1)
    text = printed(collect([tmp_path], command=""), width=150)
    assert "perplexity trained over seeds, lower is better" in text
    assert "within the spread over seeds" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0, "0"), (30.123456, "30.12"), (1234567.4, "1,234,567"), (1e-7, "1.00e-07"), (float("nan"), "nan")],
)
def test_numbers_are_shown_with_four_digits(value: float | None, text: str) -> None:
    assert show_number(value) == text
