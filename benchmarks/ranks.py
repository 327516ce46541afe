"""What one rank of a sharded step does; started by `torch.distributed.run`, rank 0 writes what was found as JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import facts, flops
from benchmarks.accounts import account
from benchmarks.collectives import CollectiveCounter
from benchmarks.step import synchronizer
from benchmarks.variants import (
    LIMIT,
    MAX_GRAD_NORM,
    QUANTIZERS,
    WHOLE,
    Workload,
    load_network,
    rotated_model,
)
from rotexp.metrics.memory import peaks, reset_peaks
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.own_rows.division import dividing
from rotexp.sharding.applying import shard
from rotexp.sharding.communication import Communication
from rotexp.sharding.guard import UnshardGuard, install
from rotexp.sharding.options import ShardingConfig, SyncConfig, SyncMode
from rotexp.sharding.strategies import strategy_of
from rotexp.training.coordinator import Coordinator
from rotexp.training.objectives import CrossEntropy

TIMEOUT_SECONDS = 1800


@dataclasses.dataclass(frozen=True)
class RankRequest:
    """One world to measure.

    Attributes:
        batch: blocks of all ranks together.
        modes: the guard's, one after the other.
        rounds: over the parts of a step whose processor time is taken; none are by default.
    """

    variant: str = "w16a4"
    model: str = "135m"
    batch: int = 4
    tokens: int = 256
    strategy: str = "full"
    modes: tuple[str, ...] = ("off",)
    steps: int = 3
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    rounds: int = 0

    def arguments(self) -> list[str]:
        """Return it as command-line options."""
        fields = dataclasses.asdict(self) | {"modes": ",".join(self.modes)}
        return [text for name, value in fields.items() for text in (f"--{name}", str(value))]


def run_world(
    request: RankRequest, output: Path, *, world_size: int, timeout: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Start the ranks of a request as processes of this machine, and return what rank 0 wrote.

    Raises:
        RuntimeError: a rank failed, or they took longer than `timeout` seconds.
    """
    command = [sys.executable, "-m", "benchmarks.ranks", "--output", str(output), *request.arguments()]
    start_ranks(command, world_size=world_size, threads=request.threads, timeout=timeout)
    return facts.read_json(output)


def start_ranks(command: Sequence[str], *, world_size: int, threads: int, timeout: float = TIMEOUT_SECONDS) -> None:
    """Run a command as every rank of a world on this machine, its environment as torchrun would set it.

    Raises:
        RuntimeError: a rank failed, or they took longer than `timeout` seconds.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment: dict[str, Any] = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    environment |= {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}  # spinning is no work, but counts so
    processes = [_start(command, {"RANK": rank, "LOCAL_RANK": rank, **environment}) for rank in range(world_size)]
    limit = time.monotonic() + timeout
    try:
        errors = [process.communicate(timeout=max(0.1, limit - time.monotonic()))[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{world_size} ranks took longer than {timeout:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise RuntimeError(f"rank {failed[0]} of {world_size} failed: {errors[failed[0]][-1000:]}")


def _start(command: Sequence[str], variables: dict[str, Any]) -> subprocess.Popen[str]:
    environment = os.environ | {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "localhost"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def measure_rank(request: RankRequest) -> dict[str, Any]:
    """Shard, step in every mode of the guard, and return the figures of this rank.

    Raises:
        ValueError: the ranks do not divide the batch.
    """
    world_size, device = dist.get_world_size(), _device(request)
    if request.batch % world_size:
        raise ValueError(f"--batch {request.batch}: must be a multiple of the {world_size} ranks; choose another")
    workload = Workload(request.model, request.batch, request.tokens, getattr(torch, request.dtype), device)
    with contextlib.ExitStack() as stack:
        step, network, token_ids = real_step(request, workload, stack)
        step()  # allocates, and fixes FSDP's dtypes
        modes = measure_modes(step, network, request)
        figures = _count(step)
        if request.rounds:
            figures["account"] = account(step, request.variant, workload, token_ids, rounds=request.rounds)
    return {"world_size": world_size, "request": dataclasses.asdict(request), "modes": modes, **figures}


def _device(request: RankRequest) -> torch.device:
    return torch.device("cpu") if request.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def real_step(
    request: RankRequest, workload: Workload, stack: contextlib.ExitStack
) -> tuple[Callable[[], None], Any, Tensor]:
    """Return this rank's training step, valid until the stack is left, the network, and its share of the batch."""
    model = rotated_model(load_network(workload), quantizer_of(request))
    optimizer = CayleySGD([matrix for _, matrix in model.bank.items()], lr=0.1)
    step, token_ids = sharded_step(model, optimizer, request, workload, stack)
    return step, model.network, token_ids


def quantizer_of(request: RankRequest) -> str:
    """Return the quantizer that is placed, and for the limit switched off."""
    return next(iter(QUANTIZERS)) if request.variant == LIMIT else request.variant.split()[0]


def sharded_step(
    model: RotatedModel, optimizer: Any, request: RankRequest, workload: Workload, stack: contextlib.ExitStack
) -> tuple[Callable[[], None], Tensor]:
    """Shard a model that `placed_model` placed, and return this rank's step, and its share of the batch.

    Args:
        optimizer: of the rotations: `step` and `zero_grad`.
        stack: until which is left the step is valid.
    """
    model.mode.rotate = model.mode.quantize = request.variant != LIMIT
    communication = Communication(rank=dist.get_rank(), world_size=dist.get_world_size(), device=workload.device)
    sharding = ShardingConfig(request.strategy)
    shard(
        model.network,
        sharding,
        units=model.units,
        ignored=set(model.bank.parameters()),
        device_type=workload.device.type,
        world_size=communication.world_size,
    )
    model.keep_codes(not strategy_of(sharding).reshards_after_forward)
    frozen = request.variant not in (LIMIT, WHOLE)
    division = stack.enter_context(dividing(model, sharding, communication=communication, frozen=frozen))
    coordinator = Coordinator(model.network, communication)
    coordinator.broadcast()
    objective = CrossEntropy()
    share = request.batch // communication.world_size
    first = communication.rank * share
    vocabulary = model.network.get_input_embeddings().num_embeddings  # type: ignore[operator]
    token_ids = workload.token_ids(vocabulary)[first : first + share]
    if request.variant == LIMIT:
        _require_gradient_of_embeddings(model.network)

    def step() -> None:
        loss = objective(model, token_ids)
        loss.backward()  # type: ignore[no-untyped-call]
        if request.variant != LIMIT:
            division.collect()
            coordinator.consolidate(loss.detach().reshape(1))
            coordinator.clip(MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()

    return step, token_ids


def _require_gradient_of_embeddings(network: Any) -> None:
    network.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


def measure_modes(step: Callable[[], None], network: Any, request: RankRequest) -> dict[str, Any]:
    """Take one step in every mode of the guard a round, and return what each mode took."""
    found: dict[str, dict[str, Any]] = {mode: {"seconds": []} for mode in request.modes}
    for _ in range(request.steps):
        for mode, figures in found.items():
            seconds, others = _measure_mode(step, network, mode, _device(request))
            figures["seconds"].append(seconds)
            figures |= {name: max(value, figures.get(name, 0.0)) for name, value in others.items()}
    return found


def _measure_mode(
    step: Callable[[], None], network: Any, mode: str, device: torch.device
) -> tuple[float, dict[str, float]]:
    """Return the seconds of one step under one mode, and the guard's counts and the peaks of memory."""
    guard = install(network, SyncConfig(SyncMode[mode]))
    with contextlib.ExitStack() as undo:
        if guard is not None:
            undo.callback(guard.remove)
        reset_peaks(device)
        seconds = _timed_together(step, device)
    return seconds, {**_guard_figures(guard), **peaks(device)}


def _timed_together(step: Callable[[], None], device: torch.device) -> float:
    """Return what one step of all ranks takes, from their common start to the last one's end."""
    wait = synchronizer(device)
    wait()
    dist.barrier()
    began = time.perf_counter()
    step()
    wait()
    dist.barrier()
    return time.perf_counter() - began


def _guard_figures(guard: UnshardGuard | None) -> dict[str, float]:
    if guard is None:
        return {}
    counts = guard.counts
    return {"unshards": counts.num_unshards, "barriers": counts.barriers, "waited_s": counts.seconds}


def _count(step: Callable[[], None]) -> dict[str, Any]:
    """Count one step's collectives and operations."""
    with CollectiveCounter() as counter:
        operations = flops.count_flops(step)
    seen = counter.seen
    return {
        "collectives": dict(seen.counts),
        "bytes": dict(seen.num_bytes),
        "received_bytes": seen.received_bytes,
        "flops": operations,
    }


def _modes(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    """Be the rank that the environment says this process is."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True)
    for option in dataclasses.fields(RankRequest):
        read: Any = _modes if option.name == "modes" else type(option.default)
        parser.add_argument(f"--{option.name}", type=read, default=option.default)
    options = vars(parser.parse_args(arguments))
    output = options.pop("output")
    request = RankRequest(**options)
    torch.set_num_threads(request.threads)
    if request.device == "cuda":
        torch.cuda.set_device(_device(request))
    dist.init_process_group("nccl" if request.device == "cuda" else "gloo")
    figures = measure_rank(request)
    if dist.get_rank() == 0:
        facts.write_json(output, figures)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a finalizing interpreter ends the group's threads in the middle of C++, which aborts (Python < 3.14)


if __name__ == "__main__":
    main()
