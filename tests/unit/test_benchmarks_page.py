"""The one command that measures all tables of benchmarks/README.md: it resumes, and shows one commit's figures only."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import all as everything
from benchmarks import facts, page
from benchmarks.all import PROGRAMS, ChangedError, Program
from rotexp.recipes.origin import CHANGED

STALE = "<!-- figures of fake -->\n\n| a table of an older commit |\n\n<!-- end of figures -->"
WRITES = """
import sys
from pathlib import Path
from benchmarks import facts
with open("{calls}", "a") as calls:
    calls.write("called\\n")
facts.report(Path(sys.argv[2]), [facts.make_table("A table", ("column",), [["a figure"]])], {{}})
"""


@dataclass(frozen=True)
class Script(Program):
    """A program that is a line of Python."""

    script: str = ""

    def command(self, output: Path, *, quick: bool) -> list[str]:
        """Return the command that runs it."""
        return [sys.executable, "-c", self.script, "--output", str(output)]


def measure(*programs: Program, folder: Path, commit: str | None = None) -> dict[str, str]:
    return everything.measure_all(programs, folder, commit=commit or facts.commit(), quick=True)


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    works = Script("fake", script=WRITES.format(calls=calls))
    fails = Script("other", script="raise ValueError('no such thing')")
    silent = Script("silent", script="pass")
    endless = Script("endless", script="import time; time.sleep(100)", minutes=0.01)
    failures = measure(works, fails, silent, endless, folder=tmp_path / "found")
    assert failures.keys() == {"other", "silent", "endless"}
    assert failures["other"] == "failed with status 1: ValueError: no such thing"
    assert "no figures" in failures["silent"]
    assert "more than" in failures["endless"]
    repaired = Script("other", script=works.script)
    assert measure(works, repaired, folder=tmp_path / "found") == {}
    assert calls.read_text().count("called") == 2, "one of each: what was there is not measured again"


def test_figures_of_another_commit_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    works = Script("fake", script=WRITES.format(calls=calls))
    with pytest.raises(ChangedError, match="tree changed; go back to 0123456789ab"):
        measure(works, folder=tmp_path, commit="0123456789ab")
    assert not calls.exists()
    monkeypatch.setattr(facts, "commit", lambda: "0123456789ab")
    with pytest.raises(ChangedError, match="changed while it ran"):
        measure(works, folder=tmp_path)
    assert calls.exists()
    assert {file.suffix for file in tmp_path.glob("fake*")} == {".log"}


def test_the_page_shows_one_commit_and_says_what_is_missing(tmp_path: Path) -> None:
    works = Script("fake", script=WRITES.format(calls=tmp_path / "calls"))
    measure(works, folder=tmp_path)
    sections = everything.render(tmp_path, [works, Program("new", "--fast")], {"new": "failed with status 1"})
    text = page.rewrite(f"# Page\n\n{STALE}\n", sections)
    assert "older commit" not in text
    assert "| a figure |" in text
    assert f"({facts.commit()}, " in text
    assert "MISSING: `python -m benchmarks.new --fast`: failed with status 1" in text
    assert "## New\n\n<!-- figures of new -->" in text, "a program without a place gets one"
    assert str(tmp_path) not in text, "no paths of the machine"
    assert page.rewrite(text, sections) == text
    with pytest.raises(ValueError, match="fake: no program"):
        page.rewrite(text, {name: said for name, said in sections.items() if name != "fake"})


def test_every_section_of_the_page_is_of_a_program() -> None:
    sections = everything.render(Path("nowhere"), PROGRAMS, {})
    text = page.rewrite(page.PAGE.read_text(encoding="utf-8"), sections)
    assert text.count("MISSING: `python -m") == len(PROGRAMS)
    assert text.count(page.END) == len(sections)
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)


def test_figures_are_of_a_commit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "commit", lambda: f"0123456789ab{CHANGED}")
    for arguments, said in (([], "commit the changes first"), (["--quick"], "another --page")):
        with pytest.raises(SystemExit, match="2"):
            everything.main(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_programs_are_measured_although_the_command_is_ended_in_between(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.all", "--quick", "--folder", str(tmp_path), "--page", str(copy)]
    with subprocess.Popen(command, cwd=facts.ROOT) as first:
        while not [*tmp_path.rglob(f"{PROGRAMS[1].name}.log")]:
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 128 + signal.SIGTERM
    assert [file.stem for file in tmp_path.rglob("*.json")] == [PROGRAMS[0].name]
    second = subprocess.run(command, check=True, cwd=facts.ROOT, stdout=subprocess.PIPE, text=True, timeout=1700)
    assert second.stdout.count("measured before") == 1
    text = copy.read_text(encoding="utf-8")
    assert "MISSING:" not in text
    assert {file.stem for file in tmp_path.rglob("*.json")} == {program.name for program in PROGRAMS}
    assert text.count(f"({facts.commit()}, ") == len(PROGRAMS)
    assert os.fspath(tmp_path) not in text
