"""The report from the outside: real runs become tables, a page and exports; a wrong request is one line."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_train import run_train


@dataclass(frozen=True)
class Ended:
    """A finished report."""

    code: int
    output: str
    errors: str


def report(*arguments: str | Path, cwd: Path) -> Ended:
    command = [sys.executable, "-m", "rotexp.report", *map(str, arguments)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, timeout=60)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def sweep(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended well on two ranks, and a folder as a job leaves it that was killed."""
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    ended = run_train(folder / "whole", *small, "tracker=jsonl", "sharding=full")
    assert (ended.code, ended.errors) == (0, "")
    killed = folder / "killed"
    killed.mkdir()
    (killed / "config.resolved.yaml").write_bytes((folder / "whole" / "config.resolved.yaml").read_bytes())
    (killed / "summary.json").write_text('{"status": "running", "error": null}')
    (killed / "metrics.jsonl").write_bytes((folder / "whole" / "metrics.jsonl").read_bytes()[:-40])
    return folder


@pytest.fixture(scope="module")
def made(sweep: Path) -> Ended:
    return report(sweep, "--csv", "table.csv", "--json", "table.json", cwd=sweep.parent)


def test_a_sweep_is_shown_and_written(made: Ended, sweep: Path) -> None:
    assert (made.code, made.errors) == (0, "")
    assert made.output.splitlines()[-3:] == [f"wrote {sweep}/report.html", "wrote table.csv", "wrote table.json"]
    assert "│ killed │ running │" in made.output
    assert "note: killed: metrics.jsonl: line" in made.output
    assert (sweep / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in sweep.iterdir()) == ["killed", "report.html", "whole"]


def test_the_table_holds_what_the_run_measured(made: Ended, sweep: Path) -> None:
    killed, whole = json.loads((sweep.parent / "table.json").read_text())
    summary = json.loads((sweep / "whole" / "summary.json").read_text())
    assert whole["eval/trained/perplexity"] == summary["evaluation"]["trained"]["perplexity"]
    assert whole["peak_memory"] == max(phase["peak_rss_gib_max"] for phase in summary["memory"].values())
    assert whole["seconds"] == pytest.approx(sum(summary["time"].values()))
    assert whole["device_hours"] == pytest.approx(2 * whole["seconds"] / 3600)
    assert (whole["world_size"], whole["steps"], killed["steps"]) == (2, 2, 2)
    assert killed["eval/float/perplexity"] == whole["eval/float/perplexity"]
    assert len((sweep.parent / "table.csv").read_text().splitlines()) == 3


def test_the_command_of_a_row_is_one_that_train_takes(made: Ended, sweep: Path) -> None:
    _, whole = json.loads((sweep.parent / "table.json").read_text())
    command = [sys.executable, *whole["command"].split()[1:], "--cfg", "job"]
    composed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (composed.returncode, composed.stderr) == (0, "")
    assert "strategy: full" in composed.stdout


def test_a_run_alone_gets_its_page_beside_its_files(sweep: Path, tmp_path: Path) -> None:
    ended = report("whole", "--html", tmp_path / "page.html", cwd=sweep)
    assert (ended.code, ended.errors) == (0, "")
    assert not (sweep / "whole" / "report.html").exists()
    assert report("whole", cwd=sweep).code == 0
    assert (sweep / "whole" / "report.html").stat().st_size == pytest.approx(
        (tmp_path / "page.html").stat().st_size, rel=0.01
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: DIR; --help shows what is allowed"),
        (["gone"], "gone: no such folder; name the folder of a run or of a sweep"),
        ([".."], "..: holds no run (a run is a folder with summary.json); name the folder of a run or of a sweep"),
        (["../sweep", "--htm", "x"], "unrecognized arguments: --htm x; --help shows what is allowed"),
        (["../sweep", "--html", "no/x.html"], "--html no/x.html: no is no folder; make it first"),
        (["../sweep", "--csv", "."], "--csv .: is a folder; name a file in it"),
        (
            ["../sweep", "--json", "../sweep/whole/summary.json"],
            "--json ../sweep/whole/summary.json: lies in a run's folder; name it report.…, or choose another folder",
        ),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(sweep: Path, arguments: list[str], line: str) -> None:
    empty = sweep.parent / "empty"
    (empty / "inner").mkdir(parents=True, exist_ok=True)
    cwd = empty / "inner" if arguments == [".."] else empty
    before = (sweep / "whole" / "summary.json").read_bytes()
    ended = report(*arguments, cwd=cwd)
    assert (ended.code, ended.output, ended.errors) == (2, "", f"rotexp: {line}\n")
    assert (sweep / "whole" / "summary.json").read_bytes() == before
    assert [path.name for path in empty.iterdir()] == ["inner"]


def test_a_reader_that_stops_early_gets_no_traceback(sweep: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m rotexp.report sweep --html {tmp_path}/page.html | head -1"
    ended = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True, cwd=sweep.parent)
    assert ended.stderr == ""
    assert (tmp_path / "page.html").exists()


def test_neither_torch_nor_hydra_is_loaded(sweep: Path) -> None:
    code = (
        "import sys; from rotexp.comparison.report import report; report(sys.argv[1:]);"
        "sys.stderr.write(str({'torch', 'hydra', 'omegaconf', 'transformers', 'wandb'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(sweep)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert ended.stderr == "set()"
