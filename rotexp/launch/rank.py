"""What every rank does before and after its experiment: threads, log, process group."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    set_seed,
)

from rotexp.config.schema import Config
from rotexp.experiment.context import open_context
from rotexp.experiment.experiment import run_experiment
from rotexp.experiment.inputs import Inputs
from rotexp.process.signals import StopRequest, interruptible
from rotexp.runfolder.layout import rank_log
from rotexp.training.batches import accumulation_steps


def run_rank(
    config: Config,
    inputs: Inputs,
    folder: Path,
    *,
    accelerator: Accelerator | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Run the experiment as the rank that the environment says this process is.

    Args:
        stop: what takes signals (None: one of its own).

    Raises:
        Interrupted: a signal came before the run was done.
        PhaseError: a phase failed.
    """
    accelerator = accelerator or open_accelerator(config)
    rank = accelerator.process_index
    _log_to(folder / rank_log(rank), quiet=rank > 0)
    set_seed(config.seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with interruptible(stop) as request:
            run_experiment(open_context(config, inputs, folder, accelerator=accelerator, stop=request))
            with request.deferred():  # it is done: a signal comes too late to interrupt it
                accelerator.wait_for_everyone()  # gloo aborts a rank whose peers leave while it is still leaving
    except (Exception, SystemExit):
        logging.getLogger(__name__).info("the run failed", exc_info=True)  # to the file; the parent tells people
        raise  # with the group open: closed, it would make its peers fail too, before this failure is recorded
    if dist.is_initialized():
        dist.destroy_process_group()


def open_accelerator(config: Config) -> Accelerator:
    """Set this rank's threads and join the process group, on nccl and its own GPU or on gloo.

    In a world of one there is no group and no address is needed.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    threads = config.launch.threads or max(1, (os.cpu_count() or 1) // local_ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Accelerate sets its own number where there is none
    accumulation = accumulation_steps(config, world_size=world_size)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=config.launch.timeout_minutes))],
    )
    _choose_kernels()
    torch.set_num_threads(threads)
    return accelerator


def _choose_kernels() -> None:
    """Let MKL choose its kernels of functions by element before several threads call them for the first time.

    In their first call of a process two threads can get kernels of different accuracy (pytorch/pytorch#188792).
    """
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.exp, torch.log, torch.sqrt, torch.sin, torch.cos, torch.tanh, torch.erf):
            function(one)


def _log_to(path: Path, *, quiet: bool) -> None:
    """Send this rank's log records to its file; on ranks above 0 the standard streams too."""
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    if quiet:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
    else:
        warnings = logging.StreamHandler()
        warnings.setLevel(logging.WARNING)
        handlers.append(warnings)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True, format="%(asctime)s %(name)s %(message)s")
