"""The training loop: batch, forward, backward, consolidate, clip, step, retract, log."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.data.blocks import TokenBlocks
from rotexp.metrics.flops import Utilization
from rotexp.metrics.profiler import StepProfiler, part
from rotexp.process.signals import Interrupted, StopRequest
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.own_rows.division import Division, dividing, may_divide
from rotexp.sharding.communication import Communication
from rotexp.sharding.guard import UnshardGuard
from rotexp.sharding.replicas import Divergence
from rotexp.training.batches import accumulation_steps, load_batches, micro_batch_size
from rotexp.training.consolidation import AsTheyCome, Consolidation, InOrder
from rotexp.training.coordinator import Coordinator, Norms
from rotexp.training.meter import Meter
from rotexp.training.objectives import Objective, Teacher
from rotexp.training.options import OnNonfinite, Trainable
from rotexp.training.state import TrainingState
from rotexp.training.threads import check_threads

LOGGER = logging.getLogger(__name__)

Log = Callable[[int, dict[str, float]], None]
"""Takes a step, counted from 1, and its metrics."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a run does between the steps of its training.

    Attributes:
        log: takes the metrics of a step.
        save: writes a checkpoint of the state.
        held_out_loss: measures what is trained, as it is, on windows that are not trained on.
        stop: asks for a checkpoint and the end.
        profiler: is told when a step has ended.
    """

    log: Log
    save: Callable[[], None]
    held_out_loss: Callable[[], float]
    stop: StopRequest
    profiler: StepProfiler | None = None


def train(
    state: TrainingState,
    blocks: TokenBlocks,
    config: Config,
    *,
    accelerator: Accelerator,
    communication: Communication,
    teacher: Teacher | None,
    hooks: Hooks,
    guard: UnshardGuard | None = None,
    utilization: Utilization | None = None,
) -> None:
    """Train on token blocks (blocks, tokens) from the state's step on, and project the rotations onto their group.

    Raises:
        FloatingPointError: a loss or gradient is not finite, and `train.on_nonfinite` is stop; all ranks raise alike.
        Interrupted: a signal ended the run, and the state was saved.
    """
    model = state.model
    coordinator = Coordinator(
        model.network, communication, master=state.master, optimizers=state.optimizers, ema=state.ema
    )
    _start(state, coordinator, config)
    objective: Objective = build(config.objective)
    if config.numerics.exact and config.launch.threads is None:
        size = micro_batch_size(config, world_size=communication.world_size)
        token_ids = torch.from_numpy(blocks[:size]).to(accelerator.device)
        check_threads(model, objective, token_ids, teacher=teacher, communication=communication)
    meter = Meter(state, config, coordinator, guard, utilization)
    frozen = may_divide(config, distills=objective.distills)
    divided = dividing(model, config.sharding, communication=communication, frozen=frozen)
    with model.mode.set(rotate=True, quantize=True), hooks.stop.deferred(), divided as division:
        consolidation = _consolidation(config, accelerator, state, coordinator, division)
        loop = _Loop(state, config, accelerator, coordinator, division, consolidation, objective, teacher, meter, hooks)
        loop.run(blocks)
        _conclude(state, coordinator, config, earlier=meter.divergence)
    state.result.seconds = meter.seconds
    if hooks.stop.signal is not None:  # it came after the last step, which is saved
        raise Interrupted(hooks.stop.signal)


def _start(state: TrainingState, coordinator: Coordinator, config: Config) -> None:
    """Forget what was searched for other rotations or weights than those that training starts with."""
    if state.step == 0:  # later it is the checkpoint that says which clip ratios are in use
        state.model.refresh_quantizers()  # what was searched until now belongs to other rotations
    if coordinator.settle(coordinator.divergence(frozen=True), config.metrics.on_divergence, step=state.step):
        state.model.refresh_quantizers()


def _consolidation(
    config: Config, accelerator: Accelerator, state: TrainingState, coordinator: Coordinator, division: Division
) -> Consolidation:
    if not config.numerics.exact:
        return AsTheyCome(accelerator, state, coordinator, division)
    communication = coordinator.communication
    micro_batches = accumulation_steps(config, world_size=communication.world_size)
    return InOrder(state.model.network, communication, micro_batches=micro_batches)


@dataclass(frozen=True)
class _Loop:
    """What the steps of a training share."""

    state: TrainingState
    config: Config
    accelerator: Accelerator
    coordinator: Coordinator
    division: Division
    consolidation: Consolidation
    objective: Objective
    teacher: Teacher | None
    meter: Meter
    hooks: Hooks

    def run(self, blocks: TokenBlocks) -> None:
        """Make the steps that are left: batch, forward, backward, consolidate, clip, step with retraction, log."""
        state, config, accelerator = self.state, self.config, self.accelerator
        if state.step == 0 and config.evaluation.every is not None:
            self._log_start()
        for token_ids in self.meter.timed(load_batches(blocks, config, accelerator, first_step=state.step)):
            with accelerator.accumulate():
                with part("forward"):
                    loss = self.objective(state.model, token_ids, teacher=self.teacher)
                with part("backward"):
                    self.consolidation.backward(loss)
            if not accelerator.sync_gradients:
                continue
            with part("consolidate"):
                mean_loss, stopping = self.consolidation.means(float(self.hooks.stop.signal is not None))
            with self.coordinator.communication.equal_threads():
                with part("clip"):
                    norms = self._clip()
                with part("optimizer"):
                    rates = state.optimizers.learning_rates()
                    _advance(state, self.coordinator, config, loss=mean_loss, norms=norms)
            self._end_step(mean_loss, norms, rates, stopping=bool(stopping))

    def _clip(self) -> Norms:
        length = self.state.optimizers.uses_gradient_length
        return self.coordinator.clip(self.config.train.max_grad_norm, with_rotations=length)

    def _end_step(self, loss: float, norms: Norms, rates: dict[str, float], *, stopping: bool) -> None:
        """Measure, log and save what is due after a step that was made or skipped.

        Raises:
            Interrupted: a rank was told to stop; the state was saved.
        """
        state, config = self.state, self.config
        state.result.seconds = self.meter.seconds
        _refresh(state.model, config, state.step)
        judging = not stopping and _is_due(state.step, config.evaluation.every, config)
        held_out = self._judge() if judging else {}  # to save comes first where time is short
        with part("metrics"):
            row = self.meter.row(state.step, loss=loss, norms=norms) | rates | held_out
            if held_out or _is_due(state.step, config.train.log_every, config):
                self.hooks.log(state.step, row)
        if self.hooks.profiler is not None:
            self.hooks.profiler.step()
        if stopping or _is_due(state.step, config.train.checkpoint_every or config.train.steps, config):
            self.division.publish_clip_ratios()
            self.hooks.save()
        if stopping:
            raise Interrupted(self.hooks.stop.signal or signal.SIGTERM)

    def _judge(self) -> dict[str, float]:
        """Measure what is trained, as it is, on held-out windows, and keep it if it is the best so far."""
        with self.meter.paused():
            loss = self.hooks.held_out_loss()
            self.state.judge(loss)
        return {"eval/loss": loss}

    def _log_start(self) -> None:
        held_out = self._judge()
        with self.meter.paused():
            self.hooks.log(0, held_out)


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
        length = state.optimizers.uses_gradient_length
        keys = _rates(tensor, config, rotations=coordinator.prefix, uses_length=length)
        raise FloatingPointError(f"{fault}; lower {' or '.join(keys)}, or go on by train.on_nonfinite=skip")
    LOGGER.warning("%s; the step is skipped", fault)
    state.skip(loss)


def _rates(tensor: str | None, config: Config, *, rotations: str, uses_length: bool) -> list[str]:
    """Return the keys by which the parameter called `tensor` (None: any that is trained) takes smaller steps.

    Args:
        rotations: what names of rotations begin with.
        uses_length: whether a rotation's step depends on the length of its gradient.
    """
    rotates = config.rotation.learned if tensor is None else tensor.startswith(rotations)
    weighs = config.train.params is not Trainable.rotations if tensor is None else not rotates
    rates = {"optimizer.lr": rotates, f"adamw.{config.train.params.rate}": weighs}
    clipped = weighs or (rotates and uses_length)
    rates["train.max_grad_norm"] = clipped and config.train.max_grad_norm is not None
    return [key for key, acts in rates.items() if acts]


def _is_due(step: int, every: int | None, config: Config) -> bool:
    """Return whether what is done every so many steps, and after the last, is due; None is never."""
    return every is not None and (step == config.train.steps or step % every == 0)


def _refresh(model: RotatedModel, config: Config, step: int) -> None:
    if step % config.quant.refresh_every == 0:
        model.refresh_quantizers()
