"""Start a run: decide its world, claim its folder, open its inputs, start its ranks, record how it ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rotexp.config import MINIMUM_WORLD, Config, LaunchKind, resolved_yaml, validate_world
from rotexp.tracking.files import SUMMARY_FILE, read_summary, write_atomically, write_summary

DONE, FAILED = 0, 1


def start(config: Config, folder: Path) -> int:
    """Carry out a run in `folder` and return its exit code.

    Raises:
        ValueError: the request is wrong; nothing was started or written then.
    """
    world_size = choose_world_size(config)
    validate_world(config, world_size=world_size)
    check_folder(folder)
    from rotexp.inputs import open_inputs

    inputs = open_inputs(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.resolved.yaml", resolved_yaml(config))
        write_summary(folder, {"status": "running", "error": None})
        _run(config, inputs, folder, world_size=world_size)
    except Exception as error:
        _record_failure(folder, error)
        return FAILED
    return DONE


def choose_world_size(config: Config) -> int:
    """Return the ranks asked for, or one an accelerator, or the smallest world in which the sharding does something."""
    launch = config.launch
    if launch.kind is LaunchKind.inline:
        return 1
    if launch.nproc is not None:
        return launch.nproc
    from torch.cuda import device_count

    return device_count() or MINIMUM_WORLD[config.sharding.strategy]


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        ValueError: it does.
    """
    if (folder / SUMMARY_FILE).exists():
        status = read_summary(folder).get("status")
        raise ValueError(f"hydra.run.dir={folder}: already holds a run (status {status}); choose another, or remove it")


def _run(config: Config, inputs: Any, folder: Path, *, world_size: int) -> None:
    if world_size == 1 and config.launch.kind is not LaunchKind.elastic:
        from rotexp.launch.rank import run_rank

        run_rank(config, inputs, folder)
        return
    from rotexp.launch.elastic import run_elastic

    run_elastic(config, inputs, folder, nproc=world_size)


def _record_failure(folder: Path, error: Exception) -> None:
    """Say on standard error and in the summary what failed; a full disk must not hide the first error."""
    status = "oom" if is_out_of_memory(error) else "failed"
    message = " ".join(str(error).split()) or type(error).__name__
    sys.stderr.write(f"rotexp: the run failed: {message} (see {os.path.relpath(folder)}/rank-*.log)\n")
    try:
        write_summary(folder, {**read_summary(folder), "status": status, "error": message})
    except OSError as disk:
        sys.stderr.write(f"rotexp: hydra.run.dir={folder}: cannot be written ({disk}); free space or choose another\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a failure, or what caused it, was a lack of memory."""
    texts = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    return any(text in f"{type(error).__name__}: {error}" for text in texts)
