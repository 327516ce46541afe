"""Every token of a text must have a row in the embedding, wherever it stands; a doubtful tokenizer is said."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from run_train import run_train

from rotexp.config.composition import to_config
from rotexp.evaluate import main as evaluate
from rotexp.experiment import inputs
from rotexp.experiment.inputs import Inputs, open_inputs
from rotexp.launch.command_line import register
from rotexp.train import main as train

Open = Callable[..., Inputs]


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint of 2048 rows whose tokenizer has one token more."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "model"))

    def add(tokenizer: dict[str, Any]) -> None:
        token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": 2048, "content": "<|extra|>", "special": True} | token)

    change_tokenizer(copy, add)
    return copy


def change_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    change(tokenizer)
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.fixture
def opened(small: list[str], folder: Path) -> Open:
    """Open the inputs of the small run with that tokenizer."""
    register()

    def open_with(*changes: str) -> Inputs:
        with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
            asked = [f"model.path={folder}", *changes]
            given = {change.partition("=")[0] for change in asked}
            kept = [override for override in small if override.partition("=")[0] not in given]
            return open_inputs(to_config(hydra.compose("config", [*kept, *asked])))

    return open_with


@pytest.fixture
def text(texts: list[str], tmp_path: Path) -> Callable[[str, str], str]:
    """Write a text of the small run again with something at its end; returns the override that names it."""

    def write(name: str, end: str) -> str:
        (before,) = (override.partition("=")[2] for override in texts if override.startswith(f"data.{name}="))
        file = tmp_path / f"{name}.txt"
        file.write_text(Path(before).read_text(encoding="utf-8") + end, encoding="utf-8")
        return f"data.{name}={file}"

    return write


def test_a_token_that_no_text_uses_is_not_refused(opened: Open) -> None:
    inputs = opened()
    assert inputs.warnings == ()
    assert max(inputs.calibration.max(), inputs.evaluation.max()) < 2048


@pytest.mark.parametrize("name", ["calibration", "evaluation"])
def test_a_token_without_a_row_is_refused_behind_all_windows_too(
    name: str, opened: Open, text: Callable[[str, str], str]
) -> None:
    """`evaluation.max_windows=4` takes the first 128 of some thousand tokens."""
    line = rf"^data\.{name} \(text\): the token '<\|extra\|>' has id 2048, and .* has 2048 rows \(so 1 of the text's "
    with pytest.raises(ValueError, match=line):
        opened(text(name, "the end <|extra|>"))


def test_a_tokenizer_with_few_tokens_for_the_embedding_is_said(opened: Open, folder: Path) -> None:
    def shorten(tokenizer: dict[str, Any]) -> None:
        model, last = tokenizer["model"], 300
        model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token_id < last}
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
        tokenizer["added_tokens"] = tokenizer["added_tokens"][:1]

    change_tokenizer(folder, shorten)
    (warning,) = opened().warnings
    assert (
        warning == f"the tokenizer has 300 tokens, and the embedding of {folder} has 2048 rows; is it the model's own?"
    )
    assert opened("model=random_llama", "model.size=1b", "model.path=null").warnings == ()


@pytest.fixture
def ignorant(folder: Path) -> Path:
    """The checkpoint with a tokenizer that knows two words of English."""
    words = {"<unk>": 0, "the": 1, "of": 2} | {f"word{index}": index for index in range(3, 2000)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def test_a_tokenizer_that_does_not_know_most_of_a_text_is_said(opened: Open, ignorant: Path) -> None:
    inputs = opened()
    share = (inputs.calibration == 0).mean()
    assert 0.8 < share < 1
    start = f"data.calibration: {share:.0%} of its tokens are '<unk>', for what the tokenizer does not know; is it "
    assert inputs.warnings[0].startswith(start)
    assert [warning.partition(":")[0] for warning in inputs.warnings] == ["data.calibration", "data.evaluation"]


@pytest.mark.slow
def test_a_run_and_an_evaluation_tell_people_so(
    small: list[str],
    ignorant: Path,
    own_logging: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed = ("model.path", "train.steps", "evaluation.max_windows")
    kept = [given for given in small if not given.startswith(changed)]
    own = [f"model.path={ignorant}", "evaluation.max_windows=1"]
    run = run_train(tmp_path / "run", *kept, *own, "train.steps=0", "tracker=jsonl")
    assert run.code == 0
    measured = [given for given in kept if not given.startswith("launch")]
    monkeypatch.setattr(sys, "argv", ["rotexp", *measured, *own])
    with pytest.raises(SystemExit) as end:
        evaluate()
    assert end.value.code == 0
    for output in (run.output, capsys.readouterr().out):
        for name in ("calibration", "evaluation"):
            assert re.search(rf"warning: data\.{name}: \d\d% of its tokens are '<unk>', for what", output)


@pytest.mark.parametrize("entry", [train, evaluate])
def test_train_and_evaluate_refuse_it_in_one_line(
    entry: Callable[[], None],
    small: list[str],
    folder: Path,
    text: Callable[[str, str], str],
    own_logging: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = [given for given in small if not given.startswith(("model.path", "data.evaluation"))]
    if entry is evaluate:
        kept = [given for given in kept if not given.startswith(("train", "launch"))]
    place = [f"hydra.run.dir={tmp_path / 'run'}"] if entry is train else []
    given = [*kept, f"model.path={folder}", text("evaluation", "<|extra|>"), *place]
    monkeypatch.setattr(sys, "argv", ["rotexp", *given])
    with pytest.raises(SystemExit) as end:
        entry()
    written = capsys.readouterr()
    assert (end.value.code, written.out, written.err.count("\n")) == (2, "", 1), written.err
    assert written.err.startswith("rotexp: data.evaluation (text): the token '<|extra|>' has id 2048, ")


def test_what_does_not_fit_the_model_is_refused_before_long_texts_are_tokenized(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "cut", lambda *_arguments, **_options: pytest.fail("a text was tokenized"))
    with pytest.raises(ValueError, match=r"^rotation\.path=.*nowhere\.safetensors: no such file"):
        opened("rotation=learned", "rotation.path=nowhere.safetensors")
