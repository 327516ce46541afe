"""The index of a checkpoint of somebody else's runs no code, whatever it names."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged import RUN_FACTS

from rotexp.runfolder import checkpoint_folders
from rotexp.runfolder.checkpoint_folders import FACTS
from rotexp.sharding.communication import Communication
from rotexp.training.saved_state import Checkpoints, load


class Calling:
    """What a pickle calls when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.called


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def saved(folder: Path) -> tuple[Path, dict[str, Any]]:
    state = {str(dtype): torch.ones(3, 2, dtype=dtype) for dtype in DTYPES}
    checkpoints = Checkpoints(folder, keep=1, asynchronous=False, communication=Communication())
    return checkpoints.save(1, state, facts=RUN_FACTS), {name: torch.zeros_like(value) for name, value in state.items()}


def spoil(path: Path, function: Any, *arguments: Any) -> None:
    """Let the index call a function, and complete the checkpoint with it."""
    index = path / ".metadata"
    index.write_bytes(pickle.dumps([Calling(function, *arguments), index.read_bytes()]))
    facts = json.loads((path / FACTS).read_text())
    facts["files"][".metadata"] = checkpoint_folders._entry(index)
    (path / FACTS).write_text(json.dumps(facts))


def test_an_index_of_ours_is_read_whatever_the_dtypes(tmp_path: Path) -> None:
    path, state = saved(tmp_path)
    load(path, state, communication=Communication())
    assert all((value == 1).all() for value in state.values())


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(os.mkdir, ("ran",)), (eval, ("open('ran', 'w')",)), (torch.load, ("ran",)), (pickle.loads, (b"N.",))],
)
def test_an_index_that_calls_something_is_refused_and_calls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, arguments: tuple[Any, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    path, state = saved(tmp_path / "run")
    spoil(path, function, *arguments)
    with pytest.raises(ValueError, match=r"^resume=.*\.metadata names .*, which no index of a checkpoint needs; "):
        load(path, state, communication=Communication())
    assert not (tmp_path / "ran").exists()
    assert all((value == 0).all() for value in state.values())
