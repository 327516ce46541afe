"""Runs that are started from Python: what they return, and what they leave alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from run_train import left_behind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rotexp

pytestmark = pytest.mark.slow

START_SECONDS = 180

FAULT = """
import math, os, signal
from rotexp.training.objectives import CrossEntropy
def spoiled(self, model, token_ids, *, teacher):
    if {kill}:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("spoiled on purpose")
CrossEntropy.__call__ = spoiled
"""
"""A `sitecustomize` of the user's module path, which processes of a run read first."""


@pytest.fixture(scope="module")
def request_of(small: list[str]) -> list[str]:
    return [*small, "tracker=jsonl", "train.checkpoint_every=1"]


@pytest.fixture(scope="module")
def result(request_of: list[str], tmp_path_factory: pytest.TempPathFactory) -> rotexp.RunResult:
    return rotexp.run(request_of, folder=tmp_path_factory.mktemp("python") / "run")


def test_a_result_is_what_the_folder_holds(result: rotexp.RunResult, request_of: list[str]) -> None:
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert result.rows == rows
    assert (result.steps, result.status) == ([1, 2], "done")
    assert result.losses == [row["train/loss"] for row in rows if "train/loss" in row]
    assert result.summary == json.loads((result.folder / "summary.json").read_text())
    saved = load_file(result.folder / "rotations.safetensors")
    assert result.rotations.keys() == saved.keys() != set()
    assert all(torch.equal(matrix, saved[name]) for name, matrix in result.rotations.items())
    assert set(result.perplexities) == {"float", "quantized", "hadamard", "trained"}
    assert result.perplexities["trained"] == result.summary["evaluation"]["trained"]["perplexity"]
    assert dataclasses.replace(result.config, resume="auto") == rotexp.load_config(request_of)
    (drawn,) = result.plot().data
    assert (list(drawn.x), list(drawn.y)) == (result.steps, result.losses)
    assert f"{result.folder}" in repr(result)
    assert f"<td>trained</td><td>{result.perplexities['trained']:.2f}</td>" in result._repr_html_()


def test_evaluate_gives_the_command_s_figures(result: rotexp.RunResult, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "rotexp.evaluate",
        f"run={result.folder}",
        f"out={out}",
        "evaluation.max_windows=2",
    ]
    subprocess.run(command, check=True, capture_output=True)
    said = json.loads(out.read_text())
    found = rotexp.evaluate(result, ["evaluation.max_windows=2"])
    assert found.protocol == said["evaluation"].pop("protocol")
    assert {name: dataclasses.asdict(row) for name, row in found.rows.items()} == said["evaluation"]
    assert (
        found.facts["evaluation_seconds"].keys() == said.pop("evaluation_seconds").keys() == said["evaluation"].keys()
    )
    assert dict(found.facts) == {name: value for name, value in said.items() if name != "evaluation"} | {
        "evaluation_seconds": found.facts["evaluation_seconds"]
    }
    assert found.perplexities["trained"] == said["evaluation"]["trained"]["perplexity"]
    assert found.notes[-1].startswith("invariance: relative logit error ")
    with pytest.raises(ValueError, match=r"^run=.*: is measured with quant of its own; leave out quant"):
        rotexp.evaluate(result, ["quant=none"])


def test_export_writes_what_the_command_writes(
    result: rotexp.RunResult, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exported = rotexp.export(result, tmp_path / "python")
    assert capfd.readouterr().out == ""
    target = tmp_path / "command"
    command = [sys.executable, "-m", "rotexp.export", f"run={result.folder}", f"export.path={target}"]
    subprocess.run(command, check=True, capture_output=True)
    names = {file.name for file in target.iterdir()}
    assert {file.name for file in exported.iterdir()} == names
    for name in names:
        assert (exported / name).read_bytes() == (target / name).read_bytes(), name
    assert AutoModelForCausalLM.from_pretrained(exported).config.tie_word_embeddings is False


def state_of_this_process() -> list[Any]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return [dict(os.environ), handlers, torch.get_num_threads(), deterministic, torch.get_rng_state().tolist()]


def test_runs_in_threads_at_once_while_a_loop_runs_leave_this_process_alone(
    result: rotexp.RunResult, request_of: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = state_of_this_process()
    config = dataclasses.replace(rotexp.load_config(request_of), seed=1)

    async def notebook() -> list[rotexp.RunResult]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor() as threads:
            other = loop.run_in_executor(threads, rotexp.run, config)
            return [rotexp.run(request_of), await other]

    again, seeded = asyncio.run(notebook())
    assert state_of_this_process() == before
    assert again.losses == result.losses
    assert seeded.losses != result.losses
    assert seeded.config.seed == 1
    for run in (again, seeded):  # where the command would have put it
        assert run.folder.parts[-3] == "runs"
        assert run.folder.is_relative_to(tmp_path)


def test_a_folder_whose_run_is_done_is_refused_and_stays(
    result: rotexp.RunResult, request_of: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in result.folder.rglob("*") if file.is_file()}
    with pytest.raises(
        ValueError, match=r"^hydra.run.dir=.*: already holds a run \(status done\); choose another"
    ) as no:
        rotexp.run(request_of, folder=result.folder)
    assert {file: file.read_bytes() for file in result.folder.rglob("*") if file.is_file()} == before
    assert capfd.readouterr() == ("", f"rotexp: {no.value}\n")


def test_a_run_of_one_s_own_parts_is_read_and_measured_without_granting_them_again(
    request_of: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Path(__file__).parents[1] / "parts"
    monkeypatch.syspath_prepend(parts)
    own = ["plugins=[their_parts]", f"hydra.searchpath=[file://{parts}]", "optimizer=heavy_ball"]
    run = rotexp.run([*request_of, *own], folder=tmp_path / "run")
    assert run.config.optimizer.target == "their_parts.HeavyBall"
    measured = rotexp.evaluate(run).perplexities["trained"]
    assert measured == pytest.approx(run.perplexities["trained"], rel=1e-4)
    assert (rotexp.export(run, tmp_path / "model") / "config.json").is_file()


def test_a_model_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model.path=.*nowhere: no such folder"):
        rotexp.run(["model=hf", f"model.path={tmp_path}/nowhere"], folder=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kill", "phase", "reason"),
    [(False, "train", "phase train: RuntimeError: spoiled on purpose"), (True, None, "signal 9 ended its process")],
)
def test_a_failure_is_an_error_with_phase_and_reason(
    kill: bool, phase: str | None, reason: str, request_of: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(kill=kill))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(rotexp.RunError) as failed:
        rotexp.run(request_of, folder=tmp_path / "run")
    assert (failed.value.status, failed.value.phase, failed.value.reason) == ("failed", phase, reason)
    assert failed.value.folder == tmp_path / "run"
    assert str(failed.value) == f"the run failed: {reason} (see {tmp_path}/run/rank-*.log)"
    assert rotexp.RunResult(tmp_path / "run").losses == []


UNGUARDED = """
import sys, rotexp
print("began")
result = rotexp.run(["sharding=full", *{overrides!r}], folder={folder!r})
print("losses", len(result.losses), result.summary["world_size"])
"""


@pytest.mark.parametrize("stdin", [False, True], ids=["script", "stdin"])
def test_ranks_are_started_from_a_script_without_a_guard_and_from_a_session(
    stdin: bool, request_of: list[str], tmp_path: Path
) -> None:
    code = UNGUARDED.format(overrides=request_of, folder=str(tmp_path / "run"))
    script = tmp_path / "unguarded.py"
    script.write_text(code)
    mark = str(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-i" if stdin else str(script)],
        input=code if stdin else "",
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"ROTEXP_TEST": mark},
        cwd=tmp_path,
    )
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert [line for line in lines if line in ("began", "losses 2 2")] == ["began", "losses 2 2"]
    assert left_behind(mark) == []


INTERRUPTED = """
import rotexp
try:
    rotexp.run({overrides!r}, folder={folder!r})
except KeyboardInterrupt:
    print("interrupted here")
"""


def test_an_interrupt_ends_the_run_and_is_raised_here(request_of: list[str], tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", f"interrupt {tmp_path}"
    overrides = [*(line for line in request_of if not line.startswith("train.steps=")), "train.steps=100000"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(overrides=overrides, folder=str(folder))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"ROTEXP_TEST": mark},
    )
    deadline = time.monotonic() + START_SECONDS
    while not ((metrics := folder / "metrics.jsonl").exists() and "train/loss" in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert "interrupted here" in output
    assert "Traceback" not in errors
    assert rotexp.RunResult(folder).status == "interrupted"
    assert left_behind(mark) == []
