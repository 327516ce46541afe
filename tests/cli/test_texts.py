"""A run on texts of every form: what is printed, recorded and measured again; and texts that overlap."""

import gzip
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_train import Run, run_train

from rotexp.data.corpora import text_digest
from rotexp.evaluate import main

WARNING = "of the evaluation text that is scored stands in the calibration text too (passages of 256 letters or more"


def value(overrides: list[str], key: str) -> Path:
    (found,) = (line.partition("=")[2] for line in overrides if line.startswith(f"{key}="))
    return Path(found)


def without(overrides: list[str], *keys: str) -> list[str]:
    return [line for line in overrides if line.partition("=")[0] not in keys]


@pytest.fixture(scope="module")
def texts_of_the_run(small: list[str]) -> dict[str, str]:
    return {name: value(small, f"data.{name}").read_text(encoding="utf-8") for name in ("calibration", "evaluation")}


@pytest.fixture(scope="module")
def overlapping(
    small: list[str], texts_of_the_run: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    """A run calibrated on a pattern of packed rows that hold half of the evaluation text, which is plain."""
    folder = tmp_path_factory.mktemp("texts")
    calibration, evaluation = texts_of_the_run["calibration"], texts_of_the_run["evaluation"]
    documents = [calibration[:20_000], evaluation[: len(evaluation) // 2], calibration[20_000:]]
    for number, document in enumerate(documents):
        row = json.dumps({"id": number, "body": document}) + "\n"
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(row.encode()))
    changes = [f"data.calibration='{folder}/*.jsonl.gz'", "data.field=body", "data.max_characters=60000"]
    arguments = [*without(small, "data.calibration", "train.steps"), *changes, "train.steps=1", "tracker=jsonl"]
    return run_train(folder / "run", *arguments), folder


def test_packed_rows_are_trained_on_and_an_overlap_is_said_once_and_recorded(
    overlapping: tuple[Run, Path], texts_of_the_run: dict[str, str]
) -> None:
    run, folder = overlapping
    assert (run.code, run.errors) == (0, "")
    calibration, evaluation = texts_of_the_run["calibration"], texts_of_the_run["evaluation"]
    read = "\n\n".join([calibration[:20_000], evaluation[: len(evaluation) // 2], calibration[20_000:]])[:60_000]
    protocol = run.summary["evaluation"]["protocol"]
    assert protocol["calibration_digest"] == text_digest(read)
    assert protocol["text_digest"] == text_digest(evaluation[:60_000])
    assert protocol["share_in_calibration"] == 1  # all windows lie in the first half
    lines = run.output.splitlines()
    assert sum(WARNING in line for line in lines) == 1
    said = next(line for line in lines if WARNING in line)
    assert said.startswith(f"warning: {protocol['share_in_calibration']:.1%} of")
    limit = "warning: data.max_characters=60000: data.calibration is longer, and no more of it is read; null reads all"
    assert lines.count(limit) == 1
    assert lines.index(said) < next(number for number, line in enumerate(lines) if line.startswith("step 1/1"))
    data = yaml.safe_load((folder / "run" / "config.resolved.yaml").read_text(encoding="utf-8"))["data"]
    assert data["calibration"] == f"{folder}/*.jsonl.gz"
    assert (data["field"], data["max_characters"]) == ("body", 60_000)


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evaluate(own_logging: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rotexp.evaluate", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return ask


def test_a_run_measured_again_warns_again_and_not_on_other_text(overlapping: tuple[Run, Path], evaluate: Ask) -> None:
    _run, folder = overlapping
    code, output, errors = evaluate(f"run={folder / 'run'}")
    assert (code, errors) == (0, "")
    assert output.count(WARNING) == 1
    code, output, errors = evaluate(f"run={folder / 'run'}", "data.source=builtin", "data.max_characters=null")
    assert (code, errors) == (0, "")
    assert "warning: " not in output


def test_a_run_is_not_measured_on_the_text_it_was_calibrated_on(
    overlapping: tuple[Run, Path], evaluate: Ask, tmp_path: Path
) -> None:
    """Nor where another calibration text is named beside it."""
    run, folder = overlapping
    digest = run.summary["evaluation"]["protocol"]["calibration_digest"]
    same = f"data.evaluation='{folder}/[012].jsonl.gz'"
    code, output, errors = evaluate(f"run={folder / 'run'}", same)
    assert (code, output) == (2, "")
    assert "[012].jsonl.gz: holds the same text as data.calibration=" in errors
    (tmp_path / "another.txt").write_text("Another text. " * 200, encoding="utf-8")
    code, output, errors = evaluate(f"run={folder / 'run'}", same, f"data.calibration={tmp_path / 'another.txt'}")
    assert (code, output) == (2, "")
    assert f"is the text that the run was calibrated on (digest {digest}), whatever its spelling; " in errors
    assert errors.count("\n") == 1


SPACED = (lambda text: text.replace(" ", " \u200b"), "null")
"""Has more characters than the run's limit lets it read."""


@pytest.mark.parametrize(
    ("rewrite", "limit"), [(str, "3000"), (str, "null"), (str.upper, "60000"), (str.upper, "3000"), SPACED]
)
def test_nor_where_it_is_written_in_another_way_or_read_to_another_limit(
    rewrite: Callable[[str], str],
    limit: str,
    overlapping: tuple[Run, Path],
    evaluate: Ask,
    tmp_path: Path,
) -> None:
    """The file holds what the run read."""
    run, folder = overlapping
    rows = [json.loads(gzip.decompress((folder / f"{number}.jsonl.gz").read_bytes()))["body"] for number in range(3)]
    read = "\n\n".join(rows)[:60_000]
    assert text_digest(read) == run.summary["evaluation"]["protocol"]["calibration_digest"]
    (tmp_path / "rewritten.txt").write_text(rewrite(read), encoding="utf-8")
    (tmp_path / "another.txt").write_text("Another text. " * 900, encoding="utf-8")
    named = [f"data.{name}={tmp_path / file}" for name, file in FILES.items()]
    changes = [*named, "data.field=null", f"data.max_characters={limit}"]
    code, output, errors = evaluate(f"run={folder / 'run'}", *changes)
    assert (code, output) == (2, "")
    assert "rewritten.txt: is the text that the run was calibrated on (digest " in errors


FILES = {"evaluation": "rewritten.txt", "calibration": "another.txt"}


def old_protocol(summary: dict[str, Any]) -> None:
    del summary["evaluation"]["protocol"]["calibration_spelling"]


def test_a_run_of_before_spellings_were_kept_is_compared_by_its_digest(
    overlapping: tuple[Run, Path], evaluate: Ask, tmp_path: Path
) -> None:
    run, folder = overlapping
    shutil.copytree(run.folder, tmp_path / "run")
    old_protocol(summary := json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8")))
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (tmp_path / "another.txt").write_text("Another text. " * 900, encoding="utf-8")
    named = [f"data.evaluation='{folder}/[012].jsonl.gz'", f"data.calibration={tmp_path / 'another.txt'}"]
    code, _output, errors = evaluate(f"run={tmp_path / 'run'}", *named)
    assert code == 2
    assert "is the text that the run was calibrated on" in errors


@pytest.mark.parametrize("evaluation", ["absent", None, [], {"protocol": None}, {"protocol": {}}, 7])
def test_a_summary_without_the_digest_of_its_calibration_text_is_named(
    evaluation: object, overlapping: tuple[Run, Path], evaluate: Ask, tmp_path: Path
) -> None:
    run, _folder = overlapping
    shutil.copytree(run.folder, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    summary["evaluation"] = evaluation
    if evaluation == "absent":
        del summary["evaluation"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    code, output, errors = evaluate(f"run={tmp_path / 'run'}")
    assert (code, output) == (2, "")
    line = f"run={tmp_path / 'run'}: summary.json says no evaluation.protocol.calibration_digest; restore it, or name"
    assert line in errors
    assert errors.count("\n") == 1
