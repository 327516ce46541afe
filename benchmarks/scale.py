"""FLOPs and bytes of one rank's step at 1B, 8B and 70B, without weights or ranks: `python -m benchmarks.scale`.

The step is that of `benchmarks.ranks`, run on tensors without values and in torch's fake process group; operations and
collectives are counted as the dispatcher sees them. Every layer costs the same, so two shallow models tell of a deep
one. Not in it: elementwise work, activations' memory, searches of clip ratios, time. Which weights are divided by the
ranks' own rows is decided as on CPUs (`rotexp.rotation.own_rows.cost`), and hybrids have two replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import facts, flops
from benchmarks.collectives import CollectiveCounter
from benchmarks.ranks import RankRequest, quantizer_of, sharded_step
from benchmarks.variants import (
    LEARNED,
    LIMIT,
    QUANTIZERS,
    RANDOM_SIZES,
    Workload,
    placed_model,
    random_network,
)
from rotexp.config.components import Component
from rotexp.config.schema import Config
from rotexp.metrics.memory import GIB
from rotexp.metrics.static_memory import predict
from rotexp.models.options import ModelConfig, ModelDtype, ModelSource
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.optim.options import CayleySGDConfig
from rotexp.rotation.model import RotatedModel
from rotexp.sharding import applying
from rotexp.sharding.options import ShardingConfig
from rotexp.sharding.strategies import STRATEGIES

SIZES = {
    "1b": RANDOM_SIZES["1b"],
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "70b": (8192, 28672, 80, 64, 8, 128256),
}
"""Llama 3.2 1B, 3.1 8B and 3.1 70B, as `RANDOM_SIZES`."""

VARIANTS = (LIMIT, *QUANTIZERS)
DEPTHS = (2, 3)
FIGURES = ("flops", "received_bytes", "static_bytes")


class ValuesReadAsOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers a host that reads a tensor without values by one: every rank has every gradient, and no norm is nan."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or let the operation run."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


class StillOptimizer:
    """Forgets gradients and moves nothing: the real one is counted apart, as it reads what it is given."""

    def __init__(self, rotations: list[nn.Parameter]) -> None:
        self._rotations = rotations

    def step(self) -> None:
        """Move nothing."""

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for rotation in self._rotations:
            rotation.grad = None


def count_deep(shape: dict[str, int], request: RankRequest, *, world_size: int) -> dict[str, float]:
    """Return what `count_step` would of a model of all its layers, from models of two and of three.

    The first and the last layer may be gathered and freed unlike the others, so one layer alone tells nothing.
    """
    few, more = (count_step(shape | {"num_hidden_layers": depth}, request, world_size=world_size) for depth in DEPTHS)
    beyond = (shape["num_hidden_layers"] - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    return {name: few[name] + beyond * (more[name] - few[name]) for name in few}


def count_step(shape: dict[str, int], request: RankRequest, *, world_size: int) -> dict[str, float]:
    """Return of rank 0's step: `flops`, `received_bytes` (it sends as many), and the `static_bytes` that it holds.

    Args:
        shape: a Llama's sizes, named as in its Hugging Face config.
        request: `batch` is of all ranks together; `model` and what is measured of time are not looked at.
    """
    workload = Workload(request.model, request.batch, request.tokens, getattr(torch, request.dtype))
    network = random_network(shape, dtype=workload.dtype, device=torch.device("meta"))
    model = placed_model(network, quantizer_of(request))
    static = _static_bytes(model, request, world_size=world_size)
    optimizer = 0 if request.variant == LIMIT else flops.count_flops(_optimizer_step(model))
    with _fake_world(world_size), FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        _forget_values(network)
        rotations = [matrix for _, matrix in model.bank.items()]
        step, _ = sharded_step(model, StillOptimizer(rotations), request, workload, stack)
        stack.enter_context(ValuesReadAsOne())  # type: ignore[no-untyped-call]
        step()  # fixes FSDP's dtypes, and makes what is made once
        with CollectiveCounter() as counter:
            operations = flops.count_flops(step)
    return {
        "flops": operations + optimizer,
        "received_bytes": counter.seen.received_bytes,
        "static_bytes": static,
    }


@contextlib.contextmanager
def _fake_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of a world whose collectives move nothing; meshes are made of real numbers in it."""
    build_mesh = applying.build_mesh

    def build(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return build_mesh(*arguments, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with mock.patch.object(applying, "build_mesh", build):
            yield
    finally:
        dist.destroy_process_group()


def _forget_values(network: nn.Module) -> None:
    """Put tensors of the host, without values inside the mode, in the place of those on the meta device."""
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _optimizer_step(model: RotatedModel) -> Any:
    rotations = [nn.Parameter(torch.empty_like(matrix, device="meta")) for _, matrix in model.bank.items()]
    for rotation in rotations:
        rotation.grad = torch.empty_like(rotation)
    return CayleySGD(rotations, lr=CayleySGDConfig.lr).step


def _static_bytes(model: RotatedModel, request: RankRequest, *, world_size: int) -> int:
    """Return what a rank holds whatever the batch; of the limit, its weights and buffers."""
    config = Config(
        model=ModelConfig("random_llama", ModelSource.random, dtype=ModelDtype[request.dtype]),
        quant=QUANTIZERS[quantizer_of(request)],
        rotation=LEARNED,
        optimizer=CayleySGDConfig(),
        objective=Component("ce", "rotexp.training.objectives.CrossEntropy"),
        sharding=ShardingConfig(request.strategy),
    )
    found = predict(model, config, world_size=world_size)
    return found.weights + found.heads + found.buffers if request.variant == LIMIT else found.total


def measure(size: str, *, world_size: int, strategy: str, tokens: int, dtype: str) -> list[dict[str, Any]]:
    """Return the figures of every variant, each rank with one block of so many tokens."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = dict(zip((*names, "vocab_size"), SIZES[size], strict=True))
    request = RankRequest(model=size, strategy=strategy, batch=world_size, tokens=tokens, dtype=dtype)
    rows = []
    for variant in VARIANTS:
        found = count_deep(shape, dataclasses.replace(request, variant=variant), world_size=world_size)
        rows.append({"size": size, "ranks": world_size, "strategy": strategy, "variant": variant, **found})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures for people, every one beside the limit's."""
    figures = ("TFLOP a rank", "GiB received", "GiB held")
    columns = ["model", "ranks", "strategy", "variant", *(name for each in figures for name in (each, "÷ limit"))]
    limits = {_place(row): row for row in rows if row["variant"] == LIMIT}
    return facts.make_table("One step on paper", columns, [_cells(row, limits[_place(row)]) for row in rows])


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["size"], row["ranks"], row["strategy"]


def _cells(row: dict[str, Any], limit: dict[str, Any]) -> list[str]:
    cells = [row["size"], str(row["ranks"]), row["strategy"], row["variant"]]
    for name, unit in zip(FIGURES, (1e12, GIB, GIB), strict=True):
        cells += [f"{row[name] / unit:.4g}", f"{row[name] / limit[name]:.2f}" if limit[name] else "–"]
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Count every size, world and strategy, and write the figures."""
    parser = facts.parser(__doc__, output="scale.json", repetitions=1)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--worlds", nargs="+", type=int, default=[8])
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--tokens", type=int, default=2048, help="of the one block of each rank")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the frozen weights")
    options = parser.parse_args(arguments)
    shared = {"tokens": options.tokens, "dtype": options.dtype}
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for world_size in options.worlds:
            for strategy in options.strategies:
                rows += measure(size, world_size=world_size, strategy=strategy, **shared)
    facts.report(options.output, [table(rows)], {"scale": rows})


if __name__ == "__main__":
    main()
