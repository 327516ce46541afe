"""What the ranks of the read-out's tests do: read sharded models in chunks, and train by what they read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import torch
import torch.distributed as dist
from families import VOCABULARY, logits, make_token_ids, measure, rotated
from ranks_families import QUANTS, ROTATION, load_sharded, make_source
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotexp.rotation import readout
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.guard import UnshardGuard, install
from rotexp.sharding.local_rows import reshard
from rotexp.sharding.options import Dtype, SyncConfig, SyncMode
from rotexp.training.objectives import CrossEntropy, KLDivergence

QUANT = QUANTS["w4a4kv4"]
NAMES = ("qwen2", "gpt_neox", "gemma")
"""A head that is tied until R1 parts it from the embedding; norms that subtract means; gains with an offset."""


def itself(chunk: Sequence[Tensor], _rows: slice) -> Tensor:
    return torch.cat(list(chunk), dim=-1)


def compare(name: str, strategy: str) -> dict[str, Any]:
    """Return how far chunked logits are from whole ones of the unsharded source, and how often each gathered."""
    source, token_ids = make_source(name), make_token_ids()
    original = source(token_ids, use_cache=False).logits
    model, _ = load_sharded(source, strategy, QUANT)
    guard = install(model.network, SyncConfig(SyncMode.universal), name=f"{name} {strategy}")
    assert guard is not None
    errors: dict[str, list[float]] = {}
    kept = []
    for age, rotate in (("loaded", False), ("prepared", False), ("rotated", True), ("merged", True)):
        if age == "prepared":
            prepare(model)
        if age == "merged":
            kept = kept[:-1]
            merge(model)
        with model.mode.set(rotate=rotate, quantize=False):
            found, states = measure(model, token_ids, itself, beside=kept)
        errors[age] = [relative_error(original, each) for each in torch.split(found, VOCABULARY, dim=-1)]
        kept.append(states)
        if age == "rotated":
            reshard(model.network)
    return {"errors": errors, "unshards": _unshards(model, token_ids, guard)}


def _unshards(model: Any, token_ids: Tensor, guard: UnshardGuard) -> tuple[int, int]:
    """Return how many times a pass over whole logits gathers, and one over chunks."""
    counts = []
    for run in (lambda: logits(model, token_ids), lambda: measure(model, token_ids, itself)):
        reshard(model.network)
        before = guard.counts.num_unshards
        run()
        counts.append(guard.counts.num_unshards - before)
    return counts[0], counts[1]


def train(name: str, strategy: str, **options: Any) -> dict[str, Any]:
    """Return how far losses and gradients of a sharded model, all of it trained, are from the whole one's."""
    source, token_ids = make_source(name), make_token_ids()
    whole = rotated(source, ROTATION, QUANT)
    sharded, _ = load_sharded(source, strategy, QUANT, **options)
    for model in (whole, sharded):
        model.network.requires_grad_(True)
    prepare(sharded)
    found: dict[str, Any] = {}
    for objective in (CrossEntropy(), KLDivergence()):
        losses = [_learn(model, objective, token_ids) for model in (whole, sharded)]
        (expected, gradients), (loss, others) = losses
        errors = {key: relative_error(gradient, others[key]) for key, gradient in gradients.items()}
        kind = type(objective).__name__
        found[kind] = {"loss": abs(loss.item() - expected.item()), "value": loss, "errors": errors}
    return found


def _learn(model: RotatedModel, objective: Any, token_ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss and the whole gradient of everything that has one, which is forgotten."""
    with model.mode.set(rotate=True, quantize=True):
        loss = objective(model, token_ids)
        loss.backward()
    named = [(name, parameter.grad) for name, parameter in model.network.named_parameters()]
    gradients = {name: full(gradient) for name, gradient in named if gradient is not None}
    model.network.zero_grad()
    return loss.detach(), gradients


def full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def compare_all(strategies: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Compare every model under every strategy, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    readout.CHUNK_BYTES = 4 * VOCABULARY * 7
    both = [(name, strategy) for strategy in strategies for name in NAMES]
    found = {case: compare(*case) | {"trained": train(*case)} for case in both}
    return found | {("cast", "full"): train("qwen2", "full", output_dtype=Dtype.bfloat16)}
