"""What the ranks of the trainable tests do: differentiate by everything trained, and merge, beside the whole model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from ranks_families import Loaded, make_source, make_token_ids, rotated
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rotexp.models.arch import find_spec
from rotexp.models.materialize import materialize
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.invariance import check_merged, relative_error, trace
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.placement import place
from rotexp.rotation.trainable import start_scales, train_also
from rotexp.sharding.applying import shard
from rotexp.sharding.local_rows import local_rows, row_slice, whole
from rotexp.sharding.options import ShardingConfig
from rotexp.training.options import Trainable

ROTATION = RotationConfig(r1=True, r2=True, r4=False, init=RotationInit.random)
QUANT = QuantConfig(weights=QuantSpec(4, clip_search=True))
BATCH = 4


def place_sharded(source: Any, strategy: str, params: Trainable) -> RotatedModel:
    """Build a source model anew without memory, place, choose what is trained, shard, read and prepare it."""
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(source.config).eval().requires_grad_(False)
    model = place(network, find_spec(network), ROTATION, QUANT, seed=0)
    train_also(model, params)
    shard(
        network,
        ShardingConfig(strategy),
        units=model.units,
        ignored=model.unsharded,
        device_type="cpu",
        world_size=dist.get_world_size(),
    )
    checkpoint: Any = Loaded(dict(source.named_parameters(remove_duplicate=False)))
    materialize(network, checkpoint, device=torch.device("cpu"), added=model.added)
    prepare(model)
    return model


def place_whole(source: Any, params: Trainable) -> RotatedModel:
    model = rotated(source, ROTATION, QUANT, ready=False)
    train_also(model, params)
    prepare(model)
    return model


def gradients(model: RotatedModel, token_ids: Tensor, *, over_ranks: bool) -> dict[str, Tensor]:
    """Return every gradient of the mean loss, whole; what FSDP does not average over the ranks is averaged here."""
    with model.mode.set(rotate=True, quantize=True):
        model.logits(token_ids).square().mean().backward()
    named = {name: each for name, each in model.network.named_parameters() if each.grad is not None}
    for parameter in named.values():  # in an order that all ranks share
        if over_ranks and parameter in model.unsharded:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return {name: whole(parameter.grad) for name, parameter in named.items()}


@torch.no_grad()
def move(model: RotatedModel) -> None:
    """Change what is trained alike on every rank, whatever each holds of it."""
    generator = torch.Generator().manual_seed(1)
    for name in model.trained_names:
        parameter = model.network.get_parameter(name)
        change = 0.1 * torch.randn(parameter.shape, generator=generator)
        local_rows(parameter).add_(change[row_slice(parameter)])


def compare(name: str, strategy: str, params: Trainable) -> dict[str, Any]:
    """Return how far a sharded model's gradients and merged logits are from the whole one's."""
    source, token_ids = make_source(name), make_token_ids(rows=BATCH)
    model, alone = place_sharded(source, strategy, params), place_whole(source, params)
    for each in (model, alone):
        start_scales(each)
    scales = [*model.scales.parameters()] if model.scales else []
    other = [*alone.scales.parameters()] if alone.scales else []
    started = all(torch.equal(*pair) for pair in zip(scales, other, strict=True))
    share = BATCH // dist.get_world_size()
    found = gradients(model, token_ids[dist.get_rank() * share :][:share], over_ranks=True)
    expected = gradients(alone, token_ids, over_ranks=False)
    sharded = [key for key in model.trained_names if isinstance(model.network.get_parameter(key), DTensor)]
    result = {
        "trained": model.trained_names == alone.trained_names,
        "started": started,
        "keys": found.keys() == expected.keys(),
        "num_sharded": len(sharded),
        "num_trained": len(model.trained_names),
        "errors": {key: relative_error(gradient, found[key]) for key, gradient in expected.items()},
        "largest": {key: float(gradient.abs().max()) for key, gradient in expected.items()},
    }
    for each in (model, alone):
        move(each)
    before = trace(model, token_ids, rotate=True)
    result["moved"] = relative_error(trace(alone, token_ids, rotate=True).logits, before.logits)
    merge(model)
    result["merged"] = check_merged(before, model, dtype=torch.float32)
    return result


def compare_all(cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Compare cases of family, strategy and what is trained, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {case: compare(case[0], case[1], Trainable[case[2]]) for case in cases}
