"""The phase `train`: a state from the first step or a checkpoint's, the loop, and what of it is saved and shown."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rotexp.config.composition import to_plain
from rotexp.config.targets import build
from rotexp.experiment.context import Context, compute_dtype
from rotexp.experiment.loading import Sharded
from rotexp.metrics.flops import Utilization, utilization
from rotexp.metrics.profiler import StepProfiler
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.trainable import start_scales
from rotexp.runfolder.records import finite
from rotexp.tracking.console import profile_table
from rotexp.tracking.summary import versions
from rotexp.training.batches import accumulation_steps
from rotexp.training.coordinator import Coordinator
from rotexp.training.loop import Hooks, train
from rotexp.training.optimizers import Optimizers
from rotexp.training.options import Trainable, TrainConfig
from rotexp.training.saved_state import Checkpoints
from rotexp.training.state import TrainingState


@dataclass(frozen=True)
class Trained:
    """What training came to.

    Attributes:
        utilization: how a device's speed becomes its utilization (None: nothing was trained).
    """

    state: TrainingState
    utilization: Utilization | None = None


def train_model(context: Context, model: RotatedModel, sharded: Sharded) -> Trained:
    """Train what is to be trained, from the first step or a checkpoint's on.

    Raises:
        ValueError: the checkpoint does not fit, or cannot be read.
        Interrupted: a signal ended the training, whose state was saved.
    """
    config = context.config
    _start_scales(context, model)
    state = TrainingState(model, config, communication=context.communication)
    if not config.train.steps or not state.trains:
        state.conclude(Coordinator(model.network, context.communication).divergence())
        return Trained(state)
    _warn_of_clipping(context, state.optimizers)
    _tell_of_micro_batches(context)
    if build(config.objective).distills:
        context.measurements.load_teacher()
    for note in context.taken_over.load(state, base=sharded.weights, communication=context.communication):
        context.messages.say(f"resume: {note}")  # random states were read last
    return Trained(state, _train(context, state, sharded))


def find_utilization(context: Context, model: RotatedModel) -> Utilization:
    """Return how a device's speed becomes its utilization, and say so where that cannot be known."""
    config, dtype = context.config, compute_dtype(context.config)
    found = utilization(
        model,
        tokens=config.data.sequence_length,
        weights_trained=config.train.params is Trainable.all,
        device=context.device,
        dtype=dtype,
    )
    if found.peak is None and context.device.type != "cpu":
        device = f"{torch.cuda.get_device_name(context.device)} in {dtype}"
        context.messages.warn(f"no throughput/mfu_pct: the peak of {device} is not known to rotexp/metrics/flops.py")
    return found


def _start_scales(context: Context, model: RotatedModel) -> None:
    """Let learned scales start alike on all ranks."""
    start_scales(model)
    for ratios in model.scales.parameters() if model.scales is not None else ():
        context.communication.broadcast_(ratios.detach())


def _warn_of_clipping(context: Context, optimizers: Optimizers) -> None:
    """Say that a norm to clip to was set which changes nothing."""
    train, optimizer = context.config.train, context.config.optimizer
    acts = optimizers.uses_gradient_length or train.params is not Trainable.rotations
    if not acts and train.max_grad_norm not in (None, TrainConfig.max_grad_norm):
        context.messages.warn(
            f"train.max_grad_norm={train.max_grad_norm} changes nothing: a step of optimizer={optimizer.name} "
            "under these options is as long for any gradient; optimizer.lr sets its length"
        )


def _tell_of_micro_batches(context: Context) -> None:
    """Say that micro-batches are small only for the sake of worlds in which a rank would have a smaller share."""
    config, world_size = context.config, context.communication.world_size
    parts = accumulation_steps(config, world_size=world_size)
    if config.numerics.exact and config.train.micro_batch_size is None and parts > 1:
        context.messages.say(
            f"numerics=exact: a rank takes its {parts} blocks one by one, as any world can; "
            f"train.micro_batch_size=N, the same wherever bits are compared, is faster"
        )


def _train(context: Context, state: TrainingState, sharded: Sharded) -> Utilization:
    """Run the loop to the last step, and complete the checkpoints; return the utilization it was shown with."""
    config, model = context.config, state.model
    checkpoints = Checkpoints(
        context.folder,
        keep=config.train.keep_checkpoints,
        asynchronous=config.train.async_checkpoints,
        communication=context.communication,
    )
    profiler = _profiler(context, steps=config.train.steps - state.step)
    utilization = find_utilization(context, model)
    with profiler or nullcontext(), checkpoints.completed(context.stop):
        train(
            state,
            context.inputs.calibration,
            config,
            accelerator=context.accelerator,
            communication=context.communication,
            teacher=context.measurements.teacher,
            hooks=Hooks(
                log=partial(_log, context),
                save=partial(_save, context, state, sharded, checkpoints),
                held_out_loss=partial(context.measurements.held_out_loss, model),
                stop=context.stop,
                profiler=profiler,
            ),
            guard=sharded.guard,
            utilization=utilization,
        )
    if profiler is not None:
        context.messages.show(profile_table(profiler.figures, num_steps=profiler.num_steps))
    return utilization


def _profiler(context: Context, *, steps: int) -> StepProfiler | None:
    """Return what profiles the steps, if that is asked for."""
    return (
        StepProfiler(context.folder, rank=context.communication.rank, steps=steps) if context.config.profile else None
    )


def _log(context: Context, step: int, row: dict[str, float]) -> None:
    """Record and show the metrics of a step, with the memory of the phase so far (a collective)."""
    context.record.step = step
    row |= {f"memory/{figure}": value for figure, value in context.phases.spread().items()}
    context.record.log(row)
    if step:
        context.progress.show(step, row)


def _save(context: Context, state: TrainingState, sharded: Sharded, checkpoints: Checkpoints) -> None:
    """Write a checkpoint, unless the world is simulated, in which most of the state is never stepped."""
    if context.config.sharding.sim_world is None:
        checkpoints.save(state.step, state.tensors(), facts=_facts(context, state, sharded))


def _facts(context: Context, state: TrainingState, sharded: Sharded) -> dict[str, Any]:
    """Return what a checkpoint of this run holds beside tensors."""
    facts = {
        "state": state.facts(),
        "phases": context.phases.so_far(),
        "evaluation": context.measurements.rows,
        "shared_rows": context.record.summary.get("shared_rows", {}).get("from", {}),
        "config": to_plain(context.config),
        "base": {"model": context.inputs.checkpoint.identity, "digest": sharded.weights},
        "tracker": {"run_ids": context.record.run_ids},
        "versions": versions(),
    }
    kept: dict[str, Any] = finite(facts)
    return kept
