"""The training loop: batch, forward, backward, consolidate, clip, step, log."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable

import torch
from accelerate import Accelerator

from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.data.blocks import TokenBlocks
from rotexp.metrics.flops import Utilization
from rotexp.metrics.profiler import StepProfiler, part
from rotexp.process.signals import Interrupted, StopRequest
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.own_rows.division import dividing, may_divide
from rotexp.sharding.communication import Communication
from rotexp.sharding.guard import UnshardGuard
from rotexp.sharding.replicas import Divergence
from rotexp.training.batches import load_batches
from rotexp.training.coordinator import Coordinator, Norms
from rotexp.training.meter import Meter
from rotexp.training.objectives import Teacher
from rotexp.training.options import OnNonfinite, Trainable
from rotexp.training.state import TrainingState

LOGGER = logging.getLogger(__name__)

Log = Callable[[int, dict[str, float]], None]
"""Takes a step, counted from 1, and its metrics."""


def train(
    state: TrainingState,
    blocks: TokenBlocks,
    config: Config,
    *,
    accelerator: Accelerator,
    communication: Communication,
    teacher: Teacher | None,
    log: Log,
    save: Callable[[], None],
    held_out_loss: Callable[[], float],
    stop: StopRequest,
    guard: UnshardGuard | None = None,
    profiler: StepProfiler | None = None,
    utilization: Utilization | None = None,
) -> None:
    """Train on token blocks (blocks, tokens) from the state's step on, and project the rotations onto their group.

    Args:
        save: writes a checkpoint of the state.
        held_out_loss: measures what is trained, as it is, on windows that are not trained on.
        stop: asks for a checkpoint and the end.

    Raises:
        FloatingPointError: a loss or gradient is not finite, and `train.on_nonfinite` is stop; all ranks raise alike.
        Interrupted: a signal ended the run, and the state was saved.
    """
    model, result = state.model, state.result
    if state.step == 0:  # later it is the checkpoint that says which clip ratios are in use
        model.refresh_quantizers()  # what was searched until now belongs to other rotations
    coordinator = Coordinator(
        model.network, communication, master=state.master, optimizers=state.optimizers, ema=state.ema
    )
    if coordinator.settle(coordinator.divergence(frozen=True), config.metrics.on_divergence, step=state.step):
        model.refresh_quantizers()
    objective = build(config.objective)
    meter = Meter(state, config, coordinator, guard, utilization)

    def judged() -> dict[str, float]:
        with meter.paused():
            loss = held_out_loss()
            state.judge(loss)
        return {"eval/loss": loss}

    frozen = may_divide(config, distills=objective.distills)
    divided = dividing(model, config.sharding, communication=communication, frozen=frozen)
    with model.mode.set(rotate=True, quantize=True), stop.deferred(), divided as division:
        if state.step == 0 and config.evaluation.every is not None:
            held_out = judged()
            with meter.paused():
                log(0, held_out)
        share = torch.zeros((), device=accelerator.device)
        for token_ids in meter.timed(load_batches(blocks, config, accelerator, first_step=state.step)):
            with accelerator.accumulate():
                with part("forward"):
                    loss = objective(model, token_ids, teacher=teacher)
                with part("backward"):
                    accelerator.backward(loss)
                share += loss.detach() / accelerator.gradient_accumulation_steps
            if not accelerator.sync_gradients:
                state.accumulate()
                continue
            with part("consolidate"):
                division.collect()
                numbers = torch.stack([share, torch.full_like(share, float(stop.signal is not None))])
                mean_loss, stopping = coordinator.consolidate(numbers).tolist()
            with communication.equal_threads():
                with part("clip"):
                    length = config.optimizer.uses_gradient_length
                    norms = coordinator.clip(config.train.max_grad_norm, with_rotations=length)
                with part("optimizer"):
                    rates = state.optimizers.learning_rates()
                    _advance(state, coordinator, config, loss=mean_loss, norms=norms)
            share = torch.zeros_like(share)
            result.seconds = meter.seconds
            _refresh(model, config, state.step)
            judging = not stopping and _is_due(state.step, config.evaluation.every, config)
            held_out = judged() if judging else {}  # to save comes first where time is short
            with part("metrics"):
                row = meter.row(state.step, loss=mean_loss, norms=norms) | rates | held_out
                if held_out or _is_due(state.step, config.train.log_every, config):
                    log(state.step, row)
            if profiler is not None:
                profiler.step()
            if stopping or _is_due(state.step, config.train.checkpoint_every or config.train.steps, config):
                division.publish_clip_ratios()
                save()
            if stopping:
                raise Interrupted(stop.signal or signal.SIGTERM)
        _conclude(state, coordinator, config, earlier=meter.divergence)
    result.seconds = meter.seconds
    if stop.signal is not None:  # it came after the last step, which is saved
        raise Interrupted(stop.signal)


def _conclude(state: TrainingState, coordinator: Coordinator, config: Config, *, earlier: Divergence) -> None:
    """Keep what replicas and rotations are like, and project the rotations, after which all looks well.

    Args:
        earlier: what strayed when replicas were last compared, and may have been overwritten since.
    """
    strayed = coordinator.divergence(frozen=True)
    state.conclude(earlier.joined(strayed))
    coordinator.settle(strayed, config.metrics.on_divergence, step=state.step)
    state.optimizers.project()
    coordinator.broadcast()


def _advance(state: TrainingState, coordinator: Coordinator, config: Config, *, loss: float, norms: Norms) -> None:
    """Make the step, or skip it; every rank decides alike.

    Raises:
        FloatingPointError: the loss or a gradient is not finite, and `train.on_nonfinite` is stop.
    """
    if math.isfinite(loss) and math.isfinite(norms.total.item()):
        state.advance(loss)
        return
    tensor = coordinator.nonfinite()
    where = f"the gradient of {tensor} is not finite (loss {loss})"
    if tensor is None:
        where = f"the norm of the gradients is {norms.total.item()}" if math.isfinite(loss) else f"the loss is {loss}"
    fault = f"step {state.step + 1}: {where}"
    if config.train.on_nonfinite is OnNonfinite.stop:
        keys = _rates(tensor, config, rotations=coordinator.prefix)
        raise FloatingPointError(f"{fault}; lower {' or '.join(keys)}, or go on by train.on_nonfinite=skip")
    LOGGER.warning("%s; the step is skipped", fault)
    state.skip(loss)


def _rates(tensor: str | None, config: Config, *, rotations: str) -> list[str]:
    """Return the keys by which the parameter called `tensor` (None: any that is trained) takes smaller steps."""
    rotates = config.rotation.learned if tensor is None else tensor.startswith(rotations)
    weighs = config.train.params is not Trainable.rotations if tensor is None else not rotates
    rates = {"optimizer.lr": rotates, f"adamw.{config.train.params.rate}": weighs}
    clipped = weighs or (rotates and config.optimizer.uses_gradient_length)
    rates["train.max_grad_norm"] = clipped and config.train.max_grad_norm is not None
    return [key for key, acts in rates.items() if acts]


def _is_due(step: int, every: int | None, config: Config) -> bool:
    """Return whether what is done every so many steps, and after the last, is due; None is never."""
    return every is not None and (step == config.train.steps or step % every == 0)


def _refresh(model: RotatedModel, config: Config, step: int) -> None:
    if step % config.quant.refresh_every == 0:
        model.refresh_quantizers()
