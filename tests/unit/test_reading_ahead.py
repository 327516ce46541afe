"""The built-in corpus is read in a process beside one that imports torch, and in that process itself where it has."""

import subprocess
import sys
from pathlib import Path

import pytest

from rotexp.data import reading_ahead as module
from rotexp.data.corpora import builtin_corpus
from rotexp.data.options import DataConfig, DataSource
from rotexp.data.reading_ahead import reading_ahead

BUILTIN = DataConfig("builtin", DataSource.builtin)
BEGIN = (
    "import sys, time; from rotexp.data import reading_ahead as module; "
    "from rotexp.data.options import DataConfig, DataSource; data = DataConfig('builtin', DataSource.builtin)\n"
)


def python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has not imported torch."""
    command = [sys.executable, "-c", BEGIN + code]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_it_is_the_corpus_that_would_be_read_here_with_its_digests(tmp_path: Path) -> None:
    code = (
        "def show(read):\n"
        "    print(read.calibration_spelling, read.evaluation_spelling, hash((read.calibration, read.evaluation)))\n"
        "with module.reading_ahead(data) as read:\n"
        "    assert 'rotexp.data.corpora' not in sys.modules\n"
        "    corpus = read()\n"
        "assert {'calibration_spelling', 'evaluation_spelling'} <= vars(corpus).keys()\n"
        "show(corpus)\n"
        "from rotexp.data.corpora import builtin_corpus\n"
        "corpus = builtin_corpus()\n"
        "show(corpus)\n"
    )
    ended = python(code, cwd=tmp_path)
    assert ended.stderr == ""
    ahead, here = ended.stdout.splitlines()
    assert ahead == here


def test_nothing_of_it_is_left_where_nobody_asks_for_it(tmp_path: Path) -> None:
    code = (
        "started = []\n"
        "popen = module.subprocess.Popen\n"
        "module.subprocess.Popen = lambda *given, **named: started.append(popen(*given, **named)) or started[0]\n"
        "try:\n"
        "    with module.reading_ahead(data):\n"
        "        raise ValueError('refused')\n"
        "except ValueError as error:\n"
        "    print(error, started[0].returncode)\n"
    )
    ended = python(code, cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == ("refused -9\n", "")


def test_why_it_failed_is_said(tmp_path: Path) -> None:
    code = (
        "module.ENTRY = 'raise SystemExit(\"no disk\")'\n"
        "try:\n"
        "    with module.reading_ahead(data) as read:\n"
        "        read()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    ended = python(code, cwd=tmp_path)
    assert ended.stdout.strip() == "the built-in corpus could not be read in a process of its own: no disk"


@pytest.mark.parametrize("source", DataSource)
def test_no_process_is_started_where_torch_is_imported_or_other_texts_are_asked_for(
    source: DataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_given, **_named: pytest.fail("a process was started"))
    if source is not DataSource.builtin:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    with reading_ahead(DataConfig(source.name, source)) as read:
        assert read is builtin_corpus
