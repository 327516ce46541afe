"""What lies in a run's folder is called by `runfolder/layout.py`, and by nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rotexp.runfolder import layout

ROOT = Path(__file__).parents[2]
FILES = sorted(file for room in ("rotexp", "hydra_plugins") for file in (ROOT / room).rglob("*.py"))
NAMES = {value for name, value in vars(layout).items() if name.isupper()}
BEGINNINGS = {layout.rank_log(0).partition("0")[0], layout.trace_file(0).partition("0")[0]}
OTHERS = {layout.WANDB_FOLDER}
"""What is the name of other things too: there only a path of it counts."""


def written(text: str) -> Iterator[str]:
    """Yield names of a run's files that a module writes out: whole, at the beginning of a text, or below a path."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield from OTHERS & {str(node.right.value)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in NAMES - OTHERS or node.value.startswith((*BEGINNINGS, *(f"{name}/" for name in OTHERS))):
                yield node.value
            stem = f"{node.value}.safetensors"
            if "_" in node.value and stem in NAMES:
                yield node.value


def test_only_the_layout_names_files_of_a_run_s_folder() -> None:
    found = {str(file.relative_to(ROOT)): [*written(file.read_text(encoding="utf-8"))] for file in FILES}
    assert set(found.pop("rotexp/runfolder/layout.py")) >= NAMES - OTHERS
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        'OWN = ("checkpoints", "wandb")',
        'path = folder / f"rank-{rank}.log"',
        'logs = folder.glob("rank-*.log")',
        'trace = folder / f"trace-rank-{rank}.json"',
        'runs = folder / "wandb"',
        'command = f"wandb/{name}"',
        'files["rotations_best"] = best',
        'LOG_FILE = "job.log"',
    ],
)
def test_a_name_that_is_written_out_is_found(text: str) -> None:
    assert len([*written(text)]) == 1
    assert [*written('"""`metrics.jsonl` holds everything."""\nname = "wandb"')] == []
