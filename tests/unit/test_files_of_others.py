"""A file that Hydra reads, a run's own among them, says where to write and what to vary, never what to import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rotexp
from rotexp.launch.command_line import run_command

HEADER = "defaults: [config, _self_, {override hydra/job_logging: none}, {override hydra/hydra_logging: none}]\n"
EVIL = """
import pathlib
from hydra.experimental.callback import Callback
pathlib.Path(__file__).with_name("imported").touch()
class Evil(Callback):
    pass
"""
LOGGING = "{version: 1, root: {handlers: [h]}, handlers: {h: {class: evil.Evil}}}"
IMPORTING = {
    "hydra: {callbacks: {x: {_target_: evil.Evil}}}": "hydra.callbacks.x._target_",
    f"hydra: {{job_logging: {LOGGING}}}": "hydra.job_logging.version",
    f"hydra: {{hydra_logging: {LOGGING}}}": "hydra.hydra_logging.version",
    "hydra: {searchpath: ['pkg://evil']}": "hydra.searchpath.0",
    "hydra: {searchpath: ['${there}']}\nthere: pkg://evil": "hydra.searchpath.0",
    "hydra: {searchpath: '${there}'}\nthere: ['pkg://evil']": "hydra.searchpath",
    "hydra: ${there}\nthere: {searchpath: ['pkg://evil']}": "hydra",
    "hydra: {launcher: {_target_: evil.Evil}}": "hydra.launcher._target_",
    "hydra: {sweeper: {_target_: evil.Evil}}": "hydra.sweeper._target_",
    "hydra: {launcher: {more: [{_target_: evil.Evil}]}}": "hydra.launcher.more.0._target_",
    "hydra: {launcher: {more: '${there}'}}\nthere: {_target_: evil.Evil}": "hydra.launcher.more",
    "hydra: {sweeper: {custom_search_space: evil.Evil}}": "hydra.sweeper.custom_search_space",
    "hydra: {sweeper: {params: {'+hydra.callbacks.x._target_': evil.Evil}}}": "hydra.sweeper.params.+hydra",
    "hydra: {job: {env_set: {PYTHONSTARTUP: evil.py}}}": "hydra.job.env_set.PYTHONSTARTUP",
    "hydra: {mode: MULTIRUN}": "hydra.mode",
}
CALLBACK = "{x: {_target_: evil.Evil}}"
PLACES = {
    "experiment/bad": f"# @package _global_\nhydra: {{callbacks: {CALLBACK}}}",
    "hydra/callbacks/bad": CALLBACK[1:-1],
    "bad/hydra": f"# @package hydra\ncallbacks: {CALLBACK}",
    "other/bad": CALLBACK[1:-1],
}
CHOSEN = {
    "experiment/bad": "override experiment: bad",
    "hydra/callbacks/bad": "override hydra/callbacks: bad",
    "bad/hydra": "bad: hydra",
    "other/bad": "other@hydra.callbacks: bad",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return tmp_path


def answer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str, entry: str = "config"
) -> tuple[object, str]:
    """Run a command by a file of that folder, as `--config-dir` does; return its exit code and its words."""
    given = ["--config-dir", str(folder), "--config-name", "mine", f"hydra.run.dir={folder / 'run'}", *more]
    monkeypatch.setattr(sys, "argv", ["rotexp.train", *given])
    with pytest.raises(SystemExit) as end:
        run_command(lambda composed: 0, config_name=entry)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("text", IMPORTING)
@pytest.mark.parametrize("entry", ["config", "evaluate"])
def test_a_file_does_not_say_what_hydra_imports(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_logging: None,
    text: str,
    entry: str,
) -> None:
    (folder / "mine.yaml").write_text(f"{HEADER.replace('[config', f'[{entry}')}{text}\n")
    code, words = answer(folder, capsys, monkeypatch, entry=entry)
    assert (code, words.count("\n")) == (2, 1)
    assert words.startswith(f"rotexp: {IMPORTING[text]}")
    assert f"is set by a file ({folder}/mine.yaml), which may not say what is imported; " in words
    assert not (folder / "imported").exists()
    with pytest.raises(ValueError, match="is set by a file"):
        rotexp.load_config(config_name="mine", config_dir=folder)
    assert not (folder / "imported").exists()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_nor_does_a_file_of_a_group_wherever_it_puts_what_it_holds(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_logging: None,
    place: str,
    nested: bool,
) -> None:
    below = folder / "more" if nested else folder
    (below / place).parent.mkdir(parents=True)
    (below / f"{place}.yaml").write_text(f"{PLACES[place]}\n")
    search = f"hydra: {{searchpath: ['file://{below}']}}\n" if nested else ""
    (folder / "mine.yaml").write_text(f"defaults: [config, {{{CHOSEN[place]}}}, _self_]\n{search}")
    code, words = answer(folder, capsys, monkeypatch)
    assert (code, words.count("\n")) == (2, 1), words
    assert words.startswith(f"rotexp: hydra.callbacks.x._target_: is set by a file ({below}/{place}.yaml)")
    assert not (folder / "imported").exists()


def test_a_file_says_where_to_write_and_what_to_vary_and_the_command_line_says_all(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_logging: None
) -> None:
    harmless = (
        "hydra:\n  run: {dir: elsewhere}\n  sweep: {dir: '${hydra.run.dir}-sweep', subdir: '${hydra.job.num}'}\n"
        "  job: {name: mine, chdir: false}\n  sweeper: {params: {seed: '0,1'}}\n"
        f"  searchpath: ['file://{folder}', more]\n  output_subdir: null\n"
    )
    (folder / "more").mkdir()
    monkeypatch.chdir(folder)
    launcher = "{override hydra/launcher: basic}, {override hydra/sweeper: basic}, _self_"
    (folder / "mine.yaml").write_text(f"{HEADER.replace('_self_', launcher)}{harmless}")
    assert answer(folder, capsys, monkeypatch) == (0, "")
    assert rotexp.load_config(config_name="mine", config_dir=folder).seed == 0
    assert not (folder / "imported").exists()
    typed = "+hydra.callbacks.x._target_=evil.Evil"
    assert answer(folder, capsys, monkeypatch, typed) == (0, "")
    assert (folder / "imported").exists()
