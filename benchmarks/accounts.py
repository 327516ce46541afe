"""Where a sharded step's processor time goes: each part alone, by all ranks at once, as counts that waiting is not in.

A process' time is that of all its threads, user and system, and gloo sleeps while it waits (a rank that waits 3 s for
another takes 4 ms of it), so unlike seconds on a clock it adds up over ranks, and other work on the machine moves it
little. OpenMP's threads do spin; `benchmarks.ranks.start_ranks` tells them to sleep.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks import flops
from benchmarks.collectives import CollectiveCounter, is_collective, short_name
from benchmarks.operations import OUTSIDE, time_operations
from benchmarks.optimizer import draw_rotations
from benchmarks.variants import LEARNING_RATE, LIMIT, Workload, load_network, make_steps
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.quant.encoded import decode_into
from rotexp.rotation.own_rows import weight

STEP, UNSHARDED, PLAIN, OPTIMIZER, WIRE = "step", "unsharded", "plain", "optimizer", "wire"
FEW, PLAIN_FEW, DECODING = "few tokens", "plain few tokens", "decoding"
COPIES = "fsdp"
"""The namespace of FSDP2's operations that copy shards into what is gathered, and the gathered into parameters."""

WRITTEN = {
    "_allgather_base_": "output_tensor",
    "_reduce_scatter_base_": "output_tensor",
    "alltoall_base_": "output",
    "allreduce_": None,
    "all_gather_copy_in": "all_gather_output",
    "split_with_sizes_copy": "out",
    "chunk_cat": "out",
}
"""The argument that each operation writes, which is allocated for it; what it reads or reduces in place is there."""


@dataclass(frozen=True)
class Shape:
    """What a tensor was like whose contents do not matter."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def new(self) -> Tensor:
        """Return fresh memory, whose pages the system gives when they are touched."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Call:
    """An operation with its arguments by name, tensors as shapes."""

    operation: Any
    arguments: dict[str, Any]

    def repeat(self, memory: dict[torch.dtype, Tensor]) -> None:
        """Carry it out once more, with what it reads in `memory`, and wait for its end."""
        written = WRITTEN[short_name(self.operation)]
        filled = {
            name: tree_map(lambda leaf, name=name: _tensor(leaf, None if name == written else memory), value)
            for name, value in self.arguments.items()
        }
        for leaf in tree_leaves(self.operation(**filled)):
            if isinstance(leaf, torch.ScriptObject):
                dist.Work.unbox(leaf).wait()


def _tensor(leaf: Any, memory: dict[torch.dtype, Tensor] | None) -> Any:
    if not isinstance(leaf, Shape):
        return leaf
    if memory is None:
        return leaf.new()
    if leaf.dtype not in memory or memory[leaf.dtype].numel() < leaf.shape.numel():
        memory[leaf.dtype] = torch.ones(leaf.shape.numel(), dtype=leaf.dtype, device=leaf.device)
    return memory[leaf.dtype][: leaf.shape.numel()].view(leaf.shape)


@dataclass
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every collective of the block and FSDP2's copies around it, in order."""

    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep an operation, and let it run."""
        if is_collective(func) or func.namespace == COPIES:
            names = (argument.name for argument in func._schema.arguments)
            self.calls.append(Call(func, tree_map(_shape, {**dict(zip(names, args, strict=False)), **(kwargs or {})})))
        return func(*args, **(kwargs or {}))


def _shape(leaf: Any) -> Any:
    return Shape(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Make a step, and return a function that moves the same bytes once more, by the same operations, and no more."""
    with Recorder() as recorder:
        step()
    memory: dict[torch.dtype, Tensor] = {}

    def move() -> None:
        for call in recorder.calls:
            call.repeat(memory)

    return move


def record_decoding(step: Callable[[], None]) -> Callable[[], None]:
    """Make a step, and return a function that decodes once more what this rank has gathered of divided weights."""
    calls: list[tuple[tuple[Any, ...], Any]] = []

    def keep(*tensors: Tensor, quantizer: Any) -> None:
        calls.append((tree_map(_shape, tensors), quantizer))
        decode_into(*tensors, quantizer=quantizer)

    with mock.patch.object(weight, "decode_into", keep):
        step()
    memory: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def decode_again() -> None:
        for (target, *gathered), quantizer in calls:
            decode_into(target.new(), *(_tensor(shape, memory) for shape in gathered), quantizer=quantizer)

    return decode_again


def processor_seconds(run: Callable[[], object]) -> float:
    """Return the processor time of one call on every rank, all their threads' added up, waiting not in it."""
    dist.barrier()
    began = time.process_time()
    run()
    dist.barrier()  # what others still fetch from this rank is its work as well
    return _sum(time.process_time() - began)


def waiting() -> float:
    """Return the processor time that all ranks take while they wait a second for the first."""
    return processor_seconds(lambda: time.sleep(0 if dist.get_rank() else 1))


def _sum(number: float) -> float:
    total = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def account(
    step: Callable[[], None], variant: str, workload: Workload, token_ids: Tensor, *, rounds: int
) -> dict[str, Any]:
    """Take a sharded step, which has run before, and its parts in turn, each by all ranks at once.

    Args:
        token_ids: this rank's share of the batch, (blocks, tokens).

    Returns:
        `seconds` of all ranks by part, round by round: the step; the same step of an unsharded model, every rank on its
        share; the plain forward and backward of that model; both on two tokens, where little but work on weights is
        left; the optimizer's step; decoding what was gathered; the bytes moved. `flops` of all ranks, of the steps;
        `bytes` by collective, as the last part moves them; `outside`, the processor seconds of all ranks that are in no
        operation, of the first two; `waiting`.
    """
    network = load_network(workload)
    alone, _ = make_steps([LIMIT, variant], network, token_ids)
    few, _ = make_steps([LIMIT, variant], network, token_ids[:1, :2])
    parts: dict[str, Callable[[], object]] = {STEP: step, UNSHARDED: alone[variant], PLAIN: alone[LIMIT]}
    parts |= {FEW: few[variant], PLAIN_FEW: few[LIMIT]}
    counted = {name: _sum(flops.count_flops(run)) for name, run in parts.items()}
    if variant != LIMIT:
        parts[OPTIMIZER] = _optimizer_step(network)
    if dist.get_world_size() > 1:
        parts[WIRE] = record(step)
        parts[DECODING] = record_decoding(step)
    with CollectiveCounter() as moved:
        for name in parts.keys() - counted.keys():  # the others ran when they were counted: what is kept is warm
            parts[name]()
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for name, run in itertools.chain.from_iterable(parts.items() for _ in range(rounds)):
        seconds[name].append(processor_seconds(run))
    outside = {name: _sum(time_operations(parts[name])[OUTSIDE]) for name in (STEP, UNSHARDED)}
    counts = {"flops": counted, "bytes": dict(moved.seen.num_bytes)}
    return {"seconds": seconds, **counts, "outside": outside, "waiting": waiting()}


def _optimizer_step(network: Any) -> Callable[[], object]:
    """Return the step of R1 and all R2 of a network."""
    config = network.config
    width = config.hidden_size // config.num_attention_heads
    rotations = draw_rotations([(config.hidden_size, 1), (width, config.num_hidden_layers)])
    return CayleySGD(rotations, lr=LEARNING_RATE).step
