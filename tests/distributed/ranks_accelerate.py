"""What the ranks of Accelerate's test do: run the page's lines on a placed model, and look at its rotations."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from ranks_families import make_token_ids, rotated
from ranks_tied import make_source
from torch.distributed.tensor import DTensor

from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.sharding.accelerate_plugin import ignore_module
from rotexp.sharding.communication import Communication
from rotexp.training.coordinator import Coordinator

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


def as_on_accelerators(fsdp_plugin: Any) -> Accelerator:
    """Return an Accelerator that shards on CPU as it does elsewhere; it would choose DDP there."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp_plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = fsdp_plugin
    return accelerator


def gradients(network: Any, token_ids: Any) -> Any:
    """Return the loss of the rotated model, after its backward."""
    loss = network(token_ids, use_cache=False).logits.square().mean()
    loss.backward()
    return loss


def run_page() -> dict[str, Any]:
    """Run the lines with another start on each rank, then a step's backward."""
    torch.set_num_threads(1)
    lines = re.search(r"```python\n(plugin = .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert lines is not None
    rotation = RotationConfig(r1=True, r2=True, r3=False, r4=False, init=RotationInit.random)
    alone = rotated(make_source("llama"), rotation)
    placed = rotated(make_source("llama"), rotation, seed=int(os.environ["RANK"]))
    names: dict[str, Any] = {
        "Accelerator": as_on_accelerators,
        "FullyShardedDataParallelPlugin": FullyShardedDataParallelPlugin,
        "Communication": Communication,
        "Coordinator": Coordinator,
        "ignore_module": ignore_module,
        "optimizer": torch.optim.SGD(placed.bank.parameters(), lr=0.1),
        "placed": placed,
    }
    with mock.patch.dict("os.environ", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}):
        exec(lines.group(1), names)
    rank = names["accelerator"].process_index
    token_ids = make_token_ids(rows=4)
    with placed.mode.set(rotate=True, quantize=False), alone.mode.set(rotate=True, quantize=False):
        loss = gradients(names["network"], token_ids[2 * rank : 2 * rank + 2])
        own = {name: matrix.grad.clone() for name, matrix in placed.bank.items()}
        names["coordinator"].consolidate(loss.detach()[None])
        gradients(alone.network, token_ids)
    parameters = dict(placed.network.named_parameters())
    return {
        "split": {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)},
        "whole": {name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)},
        "own": {name: gradient.numpy() for name, gradient in own.items()},
        "mean": {name: matrix.grad.numpy() for name, matrix in placed.bank.items()},
        "expected": {name: matrix.grad.numpy() for name, matrix in alone.bank.items()},
    }
