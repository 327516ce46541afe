"""Lines for people are begun in one place, and recognized there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rotexp.process.saying import PREFIX, tell, told

ROOT = Path(__file__).parents[2]


def test_what_is_told_is_one_line_that_is_recognized(capsys: pytest.CaptureFixture[str]) -> None:
    tell("a reason\n  of two lines")
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert line == "rotexp: a reason of two lines\n"
    assert told(line) == "a reason of two lines"
    assert told("a warning of torch's") is None


def test_nothing_else_writes_the_beginning_of_such_a_line() -> None:
    found = set()
    for file in (file for room in ("rotexp", "hydra_plugins") for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PREFIX):
                found.add(file.relative_to(ROOT).as_posix())
    assert found == {"rotexp/process/saying.py", "rotexp/tracking/dashboard.py"}  # the latter: a name in W&B
