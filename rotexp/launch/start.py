"""Start a run: decide its world, claim its folder, open its inputs, start its ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rotexp.config.schema import Config
from rotexp.config.validation import validate_world
from rotexp.data.reading_ahead import reading_ahead
from rotexp.experiment.beginning import Beginning, check_model, find_beginning
from rotexp.files.folders import claimed
from rotexp.launch.ending import LastResort, recorded
from rotexp.launch.options import LaunchKind
from rotexp.process.imports import uncollected
from rotexp.process.outer import adopt, is_first
from rotexp.process.signals import StopRequest, interruptible, watched
from rotexp.sharding.options import SyncMode
from rotexp.sharding.strategies import strategy_of


def start(config: Config, folder: Path) -> int:
    """Carry out a run in `folder` and return its exit code.

    Raises:
        ValueError: the request is wrong; nothing was started or written then.
    """
    last_resort = LastResort(config)
    with interruptible() as stop, watched(last_resort.act), reading_ahead(config.data) as builtin:
        parent = config.launch.nnodes > 1 and "RANK" not in os.environ  # even where SLURM started one task a node
        adopted = None if parent else adopt()
        with uncollected():
            world_size = int(adopted["WORLD_SIZE"]) if adopted else choose_world_size(config)
            validate_world(config, world_size=world_size)
            check_machine(config)
            beginning = find_beginning(config, folder) if adopted is None else Beginning()
            from rotexp.experiment.inputs import open_inputs
            from rotexp.models.load import resolve_model
            from rotexp.tracking.recording import check_own_tracker
            from rotexp.training.parts import check_parts

        check_parts(config)
        check_own_tracker(config.tracker)
        inputs = open_inputs(config, builtin=builtin)
        check_model(beginning, inputs.checkpoint.identity)
        config = replace(config, model=resolve_model(config.model, inputs.checkpoint))
        if adopted is not None:
            return _run_adopted(config, inputs, folder, adopted, stop=stop, last_resort=last_resort)
        if parent:
            from rotexp.launch.elastic import run_node

            return run_node(config, inputs, folder, nproc=world_size // config.launch.nnodes, run=_run_adopted)
        with claimed(folder, key="hydra.run.dir"):
            inputs = replace(inputs, beginning=find_beginning(config, folder))  # as it is now that it is ours
            last_resort.folder = folder
            run = partial(_run, config, inputs, folder, world_size=world_size, stop=stop)
            return recorded(config, folder, run, stop=stop)


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

    return launch.nnodes * (device_count() or -(-strategy_of(config.sharding).minimum_world // launch.nnodes))


def check_machine(config: Config) -> None:
    """Refuse what this machine or this torch cannot do.

    Raises:
        ValueError: CPU offload without an accelerator, or a torch whose private parts are not those that the guard or
            the sharding stands on.
    """
    if config.sharding.cpu_offload:
        from torch.cuda import is_available

        if not is_available():
            raise ValueError("sharding.cpu_offload=true: must be false without an accelerator; leave it out")
    try:
        _check_torch(config)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _check_torch(config: Config) -> None:
    if config.sync_mode.mode is not SyncMode.off:
        from rotexp.sharding.guard import check_torch

        check_torch(config.sync_mode.mode)
    if not strategy_of(config.sharding).keeps_weights_whole:
        from rotexp.sharding.fsdp_internals import DIVISION, TESTED, check_internals

        remedy = f"use sharding=no_shard, or torch {TESTED}, which is tested"
        check_internals(DIVISION, key=f"sharding={config.sharding.strategy}", remedy=remedy)


def _run(config: Config, inputs: Any, folder: Path, *, world_size: int, stop: StopRequest) -> None:
    if world_size == 1 and config.launch.kind is not LaunchKind.elastic:
        from rotexp.launch.rank import run_rank

        run_rank(config, inputs, folder, stop=stop)
        return
    from rotexp.launch.elastic import run_elastic

    inputs.checkpoint.weights.release()
    run_elastic(config, inputs, folder, nproc=world_size, stop=stop)


def _run_adopted(
    config: Config,
    inputs: Any,
    folder: Path,
    adopted: dict[str, str],
    *,
    stop: StopRequest,
    last_resort: LastResort | None = None,
) -> int:
    """Run as the rank that an outer launcher made this process; rank 0's folder is everybody's.

    Args:
        last_resort: what ends this process if it is late (None: its parent does).
    """
    os.environ.update(adopted)
    from accelerate.utils import broadcast_object_list

    from rotexp.launch.rank import open_accelerator, run_rank

    accelerator = open_accelerator(config)
    with ExitStack() as held:
        place = _claim(config, inputs, folder, held) if is_first() else (folder, Beginning(), "")
        shared, beginning, refusal = broadcast_object_list([*place])
        if refusal:
            raise ValueError(refusal)

        if last_resort is not None:
            last_resort.folder = shared
        inputs = replace(inputs, beginning=beginning)
        run = partial(run_rank, config, inputs, shared, accelerator=accelerator, stop=stop)
        return recorded(config, shared, run, stop=stop)


def _claim(config: Config, inputs: Any, folder: Path, held: ExitStack) -> tuple[Path, Beginning, str]:
    """Hold the folder; return it, where the run begins, and why not, which every rank must hear of."""
    try:
        held.enter_context(claimed(folder, key="hydra.run.dir"))
        beginning = find_beginning(config, folder)
        check_model(beginning, inputs.checkpoint.identity)
    except ValueError as error:
        return folder.resolve(), Beginning(), str(error)
    return folder.resolve(), beginning, ""
