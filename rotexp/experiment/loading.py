"""The phases `load` and `shard`: a model's structure without memory, then the part of its weights that a rank holds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from rotexp.experiment.context import Context, compute_dtype
from rotexp.metrics.static_memory import StaticBytes, predict
from rotexp.models.materialize import materialize
from rotexp.models.rounding_noise import perturb_embedding
from rotexp.rotation.building import build_for_run
from rotexp.rotation.model import RotatedModel, start_from_file
from rotexp.sharding.applying import EffectiveSharding, shard
from rotexp.sharding.digest import weights_digest
from rotexp.sharding.guard import UnshardGuard, install
from rotexp.sharding.strategies import strategy_of
from rotexp.tracking.console import StartUp, startup_panel
from rotexp.training.batches import tokens_per_step
from rotexp.training.coordinator import Coordinator


@dataclass(frozen=True)
class Sharded:
    """What later phases need to know of a model's sharding.

    Attributes:
        guard: of its unshards (None: `sync_mode=off`).
        weights: the digest of the weights that were read.
        static: the bytes that training is going to hold (None: nothing is).
    """

    guard: UnshardGuard | None
    weights: str
    static: StaticBytes | None


def load_model(context: Context) -> RotatedModel:
    """Build the model's structure, without memory, with rotations and quantizers in place."""
    checkpoint, config = context.inputs.checkpoint, context.config
    for warning in context.inputs.warnings:
        context.messages.warn(warning)
    if checkpoint.coarse:
        counts = ", ".join(f"{count} {grid}" for grid, count in checkpoint.coarse_counts().items())
        context.messages.say(f"weights were stored on a coarse grid: {counts}")
    return build_for_run(checkpoint, config, dtype=getattr(torch, config.model.dtype.name))


def shard_model(context: Context, model: RotatedModel, at_end: ExitStack) -> Sharded:
    """Split the parameters over the ranks, guard them, read the weights, give every rank the same rotations.

    Args:
        at_end: takes what leaves torch's classes as they were.
    """
    config, identity = context.config, context.inputs.checkpoint.identity
    effective = _split(context, model)
    guard = install(model.network, config.sync_mode, name=identity)
    if guard is not None:
        at_end.callback(guard.remove)
    _read_weights(context, model)
    model.keep_codes(not strategy_of(config.sharding).reshards_after_forward)
    Coordinator(model.network, context.communication).broadcast()
    digest = _digest(context, model)
    context.record.summary["sharding"] = {"strategy": config.sharding.strategy, "effective": asdict(effective)}
    context.messages.show(startup_panel(_start_up(context, model, effective)))
    static = _static_bytes(context, model) if config.train.steps else None
    if static is not None:
        context.messages.say(static.line())
    if guard is not None:
        context.messages.say(guard.line(identity, config.sync_mode))
    return Sharded(guard, digest, static)


def _split(context: Context, model: RotatedModel) -> EffectiveSharding:
    """Split the parameters, and warn of a strategy that has nothing to split."""
    config = context.config
    effective = shard(
        model.network,
        config.sharding,
        units=model.units,
        ignored=model.unsharded,
        device_type=context.device.type,
        world_size=context.communication.world_size,
        ranks_per_node=context.ranks_per_node,
    )
    if strategy_of(config.sharding).splits_master and not config.train.params.weights:
        name = config.sharding.strategy
        context.messages.warn(
            f"sharding={name} splits the master of trained weights, and none are trained: as no_shard"
        )
    return effective


def _read_weights(context: Context, model: RotatedModel) -> None:
    """Read what this rank holds of the checkpoint, with noise if asked for, and a file of rotations if one is named."""
    checkpoint, rotation = context.inputs.checkpoint, context.config.rotation
    materialize(
        model.network,
        checkpoint,
        device=context.device,
        added=model.added,
        compute_dtype=compute_dtype(context.config),
        communication=context.communication,
    )
    checkpoint.weights.release()
    if (noise := context.config.numerics.noise_seed) is not None:
        perturb_embedding(model.network, seed=noise)
    replaced = start_from_file(model, rotation, identity=checkpoint.identity)
    for name, error in replaced.items():
        context.messages.warn(f"{name} was {error:.1e} from orthogonal in {rotation.path}; the nearest is used")


def _digest(context: Context, model: RotatedModel) -> str:
    return weights_digest(model.network, communication=context.communication, ignored=model.unsharded)


def _start_up(context: Context, model: RotatedModel, effective: EffectiveSharding) -> StartUp:
    """Return what a person wants to know before the run has cost anything."""
    config, world_size = context.config, context.communication.world_size
    ours = model.unsharded
    simulated = config.sharding.sim_world
    mark = "" if simulated is None else f", as rank 0 of a simulated world of {simulated}: not a real training"
    return StartUp(
        model=context.inputs.checkpoint.identity,
        parameters=sum(weight.numel() for weight in model.network.parameters() if weight not in ours),
        sharding=f"{config.sharding.strategy}: {effective.line()}{mark}",
        devices=f"{world_size} x {context.device.type}",
        tokens_per_step=tokens_per_step(config, world_size=world_size),
        steps=config.train.steps - context.taken_over.step,
        folder=context.folder,
        step_seconds=context.taken_over.step_seconds,
    )


def _static_bytes(context: Context, model: RotatedModel) -> StaticBytes:
    return predict(
        model,
        context.config,
        world_size=context.communication.world_size,
        rank=context.communication.rank,
        ranks_per_node=context.ranks_per_node,
        device_type=context.device.type,
    )
