"""Start a run: decide its world, claim its folder, open its inputs, start its ranks, record how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rotexp.compose import resolved_yaml
from rotexp.config import MINIMUM_WORLD, Config, LaunchKind, SyncMode
from rotexp.folders import claimed, write_atomically
from rotexp.launch.outer import adopt, is_first
from rotexp.resumption import Resumption, check_model, find_resumption
from rotexp.signals import Interrupted, interruptible
from rotexp.tracking.files import CONFIG_FILE, read_summary, write_summary
from rotexp.validation import validate_world

DONE, FAILED = 0, 1


def start(config: Config, folder: Path) -> int:
    """Carry out a run in `folder` and return its exit code.

    Raises:
        ValueError: the request is wrong; nothing was started or written then.
    """
    with interruptible():
        parent = config.launch.nnodes > 1 and "RANK" not in os.environ  # even where SLURM started one task a node
        adopted = None if parent else adopt()
        world_size = int(adopted["WORLD_SIZE"]) if adopted else choose_world_size(config)
        validate_world(config, world_size=world_size)
        check_machine(config)
        resumption = find_resumption(config, folder) if adopted is None else Resumption()
        from rotexp.inputs import open_inputs
        from rotexp.models.load import resolve_model

        inputs = open_inputs(config)
        check_model(resumption, inputs.checkpoint.identity)
        config = replace(config, model=resolve_model(config.model, inputs.checkpoint))
        if adopted is not None:
            return _run_adopted(config, inputs, folder, adopted)
        if parent:
            from rotexp.launch.elastic import run_node

            return run_node(config, inputs, folder, nproc=world_size // config.launch.nnodes, run=_run_adopted)
        with claimed(folder, key="hydra.run.dir"):
            inputs = replace(inputs, resumption=find_resumption(config, folder))  # as it is now that it is ours
            return _recorded(config, folder, lambda: _run(config, inputs, folder, world_size=world_size))


def choose_world_size(config: Config) -> int:
    """Return the ranks asked for, or one an accelerator, or the smallest world in which the sharding does something.

    On several nodes each has as many ranks as this one.
    """
    launch = config.launch
    if launch.kind is LaunchKind.inline or config.sharding.sim_world is not None:
        return launch.nproc or 1
    if launch.nproc is not None:
        return launch.nproc * launch.nnodes
    from torch.cuda import device_count

    return launch.nnodes * (device_count() or -(-MINIMUM_WORLD[config.sharding.strategy] // launch.nnodes))


def check_machine(config: Config) -> None:
    """Refuse what this machine or this torch cannot do.

    Raises:
        ValueError: CPU offload without an accelerator, or a guard that this torch was not tested with.
    """
    if config.sharding.cpu_offload:
        from torch.cuda import is_available

        if not is_available():
            raise ValueError("sharding.cpu_offload=true: must be false without an accelerator; leave it out")
    if config.sync_mode.mode is not SyncMode.off:
        from rotexp.sync.guard import check_torch

        try:
            check_torch()
        except RuntimeError as error:
            raise ValueError(str(error)) from None


def _recorded(config: Config, folder: Path, run: Callable[[], None]) -> int:
    """Run, and leave in the folder how it ended; return the exit code."""
    try:
        if is_first():
            write_atomically(folder / CONFIG_FILE, resolved_yaml(config))
            write_summary(folder, {"status": "running", "error": None})
        run()
    except Interrupted as interruption:
        _record_end(folder, "interrupted", str(interruption))
        return interruption.exit_code
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        _record_end(folder, "oom" if is_out_of_memory(error) else "failed", message)
        return FAILED
    return DONE


def _run(config: Config, inputs: Any, folder: Path, *, world_size: int) -> None:
    if world_size == 1 and config.launch.kind is not LaunchKind.elastic:
        from rotexp.launch.rank import run_rank

        run_rank(config, inputs, folder)
        return
    from rotexp.launch.elastic import run_elastic

    inputs.checkpoint.weights.release()
    run_elastic(config, inputs, folder, nproc=world_size)


def _run_adopted(config: Config, inputs: Any, folder: Path, adopted: dict[str, str]) -> int:
    """Run as the rank that an outer launcher made this process; rank 0's folder is everybody's."""
    os.environ.update(adopted)
    from accelerate.utils import broadcast_object_list

    from rotexp.launch.rank import open_accelerator, run_rank

    accelerator = open_accelerator(config)
    with ExitStack() as held:
        place = _claim(config, inputs, folder, held) if is_first() else (folder, Resumption(), "")
        shared, resumption, refusal = broadcast_object_list([*place])
        if refusal:
            raise ValueError(refusal)

        def run() -> None:
            run_rank(config, replace(inputs, resumption=resumption), shared, accelerator=accelerator)

        return _recorded(config, shared, run)


def _claim(config: Config, inputs: Any, folder: Path, held: ExitStack) -> tuple[Path, Resumption, str]:
    """Hold the folder; return it, where the run begins, and why not, which every rank must hear of."""
    try:
        held.enter_context(claimed(folder, key="hydra.run.dir"))
        resumption = find_resumption(config, folder)
        check_model(resumption, inputs.checkpoint.identity)
    except ValueError as error:
        return folder.resolve(), Resumption(), str(error)
    return folder.resolve(), resumption, ""


def _record_end(folder: Path, status: str, message: str) -> None:
    """Say on standard error, and in the summary unless a rank said so before, how a run ended.

    A full disk must not hide the first error.
    """
    sys.stderr.write(f"rotexp: the run {status}: {message} (see {os.path.relpath(folder)}/rank-*.log)\n")
    try:
        summary = read_summary(folder)
        if summary.get("status", "running") == "running":
            write_summary(folder, {**summary, "status": status, "error": message})
    except OSError as disk:
        sys.stderr.write(f"rotexp: hydra.run.dir={folder}: cannot be written ({disk}); free space or choose another\n")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a failure, or what caused it, was a lack of memory."""
    texts = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    return any(text in f"{type(error).__name__}: {error}" for text in texts)
