"""A finished run's figures are measured again, or others on another protocol; a model is measured as it comes."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from run_train import Run, run_train
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotexp.data.blocks import cut
from rotexp.evaluate import main

pytestmark = pytest.mark.slow

RUNS = {
    "rotations": ["quant.weights.bits=2"],
    "scales": ["train.params=rotations_and_scales", "quant.weights.group_size=8", "quant.weights.bits=3"],
    "all, sharded, with R4": ["train.params=all", "adamw.lr=0.01", "sharding=full", "rotation=learned_r4"],
}


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation said, and the figures it wrote."""

    code: int
    output: str
    errors: str
    figures: dict[str, Any] = field(default_factory=dict)


Evaluate = Callable[..., Evaluation]


@pytest.fixture
def evaluate(
    own_logging: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Evaluate:
    """Runs the command in this process, in an empty folder, where it must leave nothing but the file it is told of."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")

    def ask(*arguments: str) -> Evaluation:
        monkeypatch.setattr(sys, "argv", ["rotexp.evaluate", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        (written, *others) = [*folder.iterdir()] or [None]
        assert others == []
        figures = {} if written is None else json.loads(written.read_text(encoding="utf-8"))
        return Evaluation(int(end.value.code or 0), captured.out, captured.err, figures)

    return ask


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS.keys())
def trained(request: pytest.FixtureRequest, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_train(tmp_path_factory.mktemp("run") / "folder", *small, "tracker=jsonl", *request.param)
    assert (run.code, run.errors) == (0, "")
    return run


@pytest.fixture(scope="module")
def done(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that trained nothing."""
    arguments = [*measured(small), "train.steps=0", "launch.threads=1", "tracker=jsonl"]
    run = run_train(tmp_path_factory.mktemp("run") / "done", *arguments)
    assert (run.code, run.errors) == (0, "")
    return run


def test_a_run_measured_again_has_the_figures_of_its_summary(trained: Run, evaluate: Evaluate) -> None:
    ended = evaluate(f"run={trained.folder}", "out=figures.json")
    assert (ended.code, ended.errors) == (0, "")
    assert ended.figures["run"] == str(trained.folder)
    rows, expected = ended.figures["evaluation"], trained.summary["evaluation"]
    assert rows.keys() == {"protocol", "float", "quantized", "trained"}
    assert rows.pop("protocol") == expected["protocol"]
    for name, row in rows.items():
        assert row == pytest.approx(expected[name], rel=1e-6, abs=1e-7), name
    kinds = [rows[name]["kl"] for name in ("trained", "quantized")]
    assert 0 < kinds[0] != pytest.approx(kinds[1], rel=0.01)
    perplexity = f"{rows['trained']['perplexity']:.2f}"
    assert any("│ trained " in line and perplexity in line for line in ended.output.splitlines())
    assert ended.output.endswith("wrote figures.json\n")


def test_a_run_is_measured_on_another_protocol(done: Run, evaluate: Evaluate, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40, encoding="utf-8")
    changes = [f"data.evaluation={text}", "evaluation.window=16", "evaluation.max_windows=3"]
    ended = evaluate(f"run={done.folder}", *changes, "out=figures.json")
    assert (ended.code, ended.errors) == (0, "")
    evaluation, before = ended.figures["evaluation"], done.summary["evaluation"]
    assert evaluation["protocol"]["tokens_scored"] == 3 * 15
    assert evaluation["protocol"]["text_digest"] != before["protocol"]["text_digest"]
    assert evaluation["protocol"]["calibration_digest"] == before["protocol"]["calibration_digest"]
    assert evaluation["float"]["perplexity"] != pytest.approx(before["float"]["perplexity"], rel=0.01)
    assert "│ merged " in ended.output


def test_a_run_in_half_precision_is_measured_in_float32_and_says_so(
    small: list[str], evaluate: Evaluate, tmp_path: Path
) -> None:
    arguments = [*measured(small), "train.steps=0", "launch.threads=1", "tracker=jsonl", "model.dtype=bfloat16"]
    run = run_train(tmp_path / "run", *arguments)
    assert run.code == 0
    ended = evaluate(f"run={run.folder}", "out=figures.json")
    assert ended.output.startswith("note: the run computed in bfloat16, and is measured in float32\n")
    assert ended.figures["model"]["dtype"] == "float32"
    again, before = (figures["evaluation"]["float"]["perplexity"] for figures in (ended.figures, run.summary))
    assert again != before
    assert again == pytest.approx(before, rel=0.02)


def test_a_model_as_it_comes_has_the_figures_of_plain_transformers_and_of_a_run(
    done: Run, small: list[str], checkpoint: Path, evaluate: Evaluate
) -> None:
    ended = evaluate(*measured(small), "quant=w4a4", "out=figures.json")
    assert (ended.code, ended.errors) == (0, "")
    rows = ended.figures["evaluation"]
    assert rows == {name: done.summary["evaluation"][name] for name in ("protocol", "float", "quantized")}
    assert rows["float"]["perplexity"] == pytest.approx(perplexity(checkpoint, small), rel=1e-5)


def test_without_a_quantizer_only_the_float_model_is_measured(small: list[str], evaluate: Evaluate) -> None:
    ended = evaluate(*measured(small), "model.dtype=auto", "out=figures.json")
    assert (ended.code, ended.errors) == (0, "")
    assert ended.figures["evaluation"].keys() == {"protocol", "float"}
    assert (ended.figures["run"], ended.figures["quant"]) == (None, "none")
    assert ended.figures["model"]["dtype"] == "float32"
    assert "no rotation" not in ended.output


def measured(small: list[str]) -> list[str]:
    """Return those of the overrides of a run that say what is measured on what."""
    return [override for override in small if not override.startswith(("train", "launch"))]


def perplexity(checkpoint: Path, small: list[str]) -> float:
    """Return what plain transformers makes of the first four windows of the text."""
    (file,) = (override.partition("=")[2] for override in small if override.startswith("data.evaluation"))
    text = Path(file).read_text(encoding="utf-8")
    windows = cut(text, AutoTokenizer.from_pretrained(checkpoint), length=32, rows=2048, key="data.evaluation")[:4]
    token_ids = torch.from_numpy(windows)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return math.exp(model(token_ids, labels=token_ids).loss)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "run: has no value; set run=DIR, or choose a model by model=OPTION"),
        (["quant=w4a4"], "run: has no value; set run=DIR, or choose a model by model=OPTION"),
        (["model.path=RUN"], "model.name: has no value; choose one by model=OPTION, or set model.name=…"),
        (["run=nowhere"], "run=nowhere: no such folder; name the folder of a finished run"),
        (["run=.", "model=tiny"], "run=.: holds no run (summary.json is missing); name the folder of a finished run"),
        (
            ["run=RUN", "model=tiny", "quant.weights.bits=16", "data=builtin"],
            "run=RUN: is measured with model, quant of its own; leave out model, quant, or run",
        ),
        (["run=RUN", "seed=0"], "run=RUN: is measured with seed of its own; leave out seed, or run"),
        (["run=RUN", "evaluation.window=1"], "evaluation.window=1: must be at least 2; lengthen it"),
        (
            ["run=RUN", "evaluation.window=many"],
            "evaluation.window=many: must be a whole number; change it or leave it",
        ),
        (["run=RUN", "data=none"], "data=none: no such option; choose one of builtin, text, wikitext2"),
        (["run=RUN", "train.steps=3"], "train.steps=3: no such key; the configuration has run, out, plugins, seed, "),
        (["run=RUN", "rotation=none"], "rotation: no such key; the configuration has run, out, plugins, seed, "),
        (["model=hf"], "model.path=null: must be a hub id or a folder; set model.path=DIR_OR_HUB_ID"),
        (["run=RUN", "out=."], "out=.: is there already; name a new file"),
        (["run=RUN", "out=RUN/summary.json"], "out=RUN/summary.json: is there already; name a new file"),
        (["model=tiny", "out=no/figures.json"], "out=no/figures.json: no is no folder; make it first"),
        (["--config-name", "config", "hydra.run.dir=."], "the configuration is not based on evaluate's schema; begin "),
    ],
)
def test_a_wrong_request_is_one_line(arguments: list[str], line: str, done: Run, evaluate: Evaluate) -> None:
    ended = evaluate(*(argument.replace("RUN", str(done.folder)) for argument in arguments))
    assert (ended.code, ended.output, ended.errors.count("\n"), ended.figures) == (2, "", 1, {}), ended.errors
    assert ended.errors.startswith(f"rotexp: {line.replace('RUN', str(done.folder))}")


def test_a_run_that_is_not_done_or_has_lost_a_file_is_refused(done: Run, evaluate: Evaluate, tmp_path: Path) -> None:
    broken = shutil.copytree(done.folder, tmp_path / "broken")
    (broken / "rotations.safetensors").unlink()
    ended = evaluate(f"run={broken}", "out=figures.json")
    line = f"rotexp: run={broken}: rotations.safetensors is missing; restore it, or run the training again\n"
    assert (ended.code, ended.output, ended.errors, ended.figures) == (2, "", line, {})
    summary = done.summary | {"status": "interrupted"}
    (broken / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    line = f"rotexp: run={broken}: the run is not done (status interrupted); name one that is\n"
    assert evaluate(f"run={broken}").errors == line


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], ["Measure a finished run's model on held-out text", "max_windows: ???"]),
        (["--cfg", "job", "run=a", "data=builtin"], ["run: a", "source: builtin", "window: ???"]),
    ],
)
def test_help_and_cfg_answer_without_torch(arguments: list[str], shown: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "rotexp.evaluate", *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ended.returncode == 0
    assert [text for text in shown if text not in ended.stdout] == []
    assert "learned" not in ended.stdout
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "accelerate", "wandb", "numpy"}
    assert os.listdir(tmp_path) == []
