"""`--help` of every entry loads nothing that takes seconds to import, and copies no schema to list the groups."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from rotexp.launch.command_line import register

ENTRIES = ("train", "evaluate", "export", "inspect", "report", "upload", "dashboard", "doctor", "reproduce")
HEAVY = ("torch", "transformers", "accelerate", "datasets", "wandb")

ASK = f"""
import runpy, sys
entry = sys.argv[1]
sys.argv[1:] = ["--help"]
try:
    runpy.run_module(f"rotexp.{{entry}}", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *[name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_loads_nothing_heavy(entry: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK, entry]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    *text, loaded = ended.stdout.splitlines()
    assert (ended.returncode, ended.stderr, loaded) == (0, "", "loaded:")
    assert f"rotexp.{entry}" in "\n".join(text)
    assert list(tmp_path.iterdir()) == []


def test_listing_groups_copies_no_schema() -> None:
    register()
    schemas = ConfigStore.instance().repo
    assert copy.deepcopy(schemas) is schemas
