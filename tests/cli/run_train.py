"""Runs the command as a person does, and reads what it left."""

import json
import os
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


@dataclass(frozen=True)
class Run:
    """A finished process and the folder it wrote."""

    folder: Path
    code: int
    output: str
    errors: str
    left_behind: list[str] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        """The end state."""
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that belong to training steps."""
        return [row for row in self.rows if "train/loss" in row]

    @property
    def rotations(self) -> dict[str, Tensor]:
        """The rotations it trained."""
        return load_file(self.folder / "rotations.safetensors")

    @property
    def perplexities(self) -> dict[str, float]:
        """Held-out perplexity by variant."""
        evaluation = self.summary["evaluation"]
        return {name: row["perplexity"] for name, row in evaluation.items() if name != "protocol"}


def saved_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """Read a checkpoint of a run, every tensor whole, as torch alone does."""
    reader = FileSystemReader(folder / "checkpoints" / f"step-{step:08d}")
    saved = reader.read_metadata().state_dict_metadata
    forms = {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in forms.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def run_train(
    folder: Path, *arguments: str, cwd: Path | None = None, timeout: float = 200, program: tuple[str, ...] = ()
) -> Run:
    """Run `python -m rotexp.train` in a process of its own, and look for processes that outlive it.

    Args:
        program: what Python runs instead of `-m rotexp.train`.
    """
    mark = uuid.uuid4().hex
    command = [sys.executable, *(program or ("-m", "rotexp.train")), *arguments, f"hydra.run.dir={folder}"]
    ended = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        env=os.environ | {"ROTEXP_TEST": mark, "COLUMNS": "120"},
    )
    return Run(folder, ended.returncode, ended.stdout, ended.stderr, left_behind(mark))


def left_behind(mark: str, *, seconds: float = 5.0) -> list[str]:
    """Return the commands of processes that carry the mark in their environment and do not end soon (Linux)."""
    until = time.monotonic() + seconds
    while (found := list(_marked(mark))) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def _marked(mark: str) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended meanwhile
            continue
