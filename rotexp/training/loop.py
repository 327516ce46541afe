"""The training loop: batch, forward, backward, consolidate, clip, step, log."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader

from rotexp.config import Config, OnNonfinite, Trainable
from rotexp.data.blocks import BlockDataset, BlockSampler, TokenBlocks
from rotexp.metrics.flops import Utilization
from rotexp.metrics.profiler import StepProfiler, part
from rotexp.metrics.rotations import rotation_metrics
from rotexp.rotation.divided import dividing
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.communication import Communication
from rotexp.signals import Interrupted, StopRequest
from rotexp.sync.guard import GuardCounts, UnshardGuard
from rotexp.targets import build
from rotexp.training.coordinator import Coordinator, Norms
from rotexp.training.objectives import Objective, Teacher
from rotexp.training.state import TrainingState

LOGGER = logging.getLogger(__name__)

Log = Callable[[int, dict[str, float]], None]
"""Takes a step, counted from 1, and its metrics."""


def micro_batch_size(config: Config, *, world_size: int) -> int:
    """Return how many blocks a rank takes at once."""
    return config.train.micro_batch_size or config.data.global_batch_size // config.sharding.ranks(world_size)


def accumulation_steps(config: Config, *, world_size: int) -> int:
    """Return in how many parts a rank takes its share of a global batch."""
    share = config.data.global_batch_size // config.sharding.ranks(world_size)
    return share // micro_batch_size(config, world_size=world_size)


def tokens_per_step(config: Config, *, world_size: int) -> int:
    """Return the tokens of one step over all ranks that exist, of which there is one where a world is simulated."""
    blocks = config.data.global_batch_size // config.sharding.ranks(world_size) * world_size
    return blocks * config.data.sequence_length


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
    coordinator = Coordinator(model.network, communication, master=state.master)
    objective = build(config.objective)
    meter = _Meter(state, config, coordinator, guard, utilization)

    def judged() -> dict[str, float]:
        with meter.paused():
            loss = held_out_loss()
            state.judge(loss)
        return {"eval/loss": loss}

    divided = dividing(model, config.sharding, frozen=_may_divide(config, objective))
    with model.mode.set(rotate=True, quantize=True), stop.deferred(), divided as division:
        if state.step == 0 and config.evaluation.every is not None:
            log(0, judged())
        share = torch.zeros((), device=accelerator.device)
        for token_ids in meter.timed(_loader(blocks, config, accelerator, communication.world_size, state.step)):
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
            held_out = judged() if _is_due(state.step, config.evaluation.every, config) else {}
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
        state.conclude(coordinator.divergence())  # before projection and broadcast, after which all is well
        state.optimizers.project()
        coordinator.broadcast()
    result.seconds = meter.seconds
    if stop.signal is not None:  # it came after the last step, which is saved
        raise Interrupted(stop.signal)


def _may_divide(config: Config, objective: Objective) -> bool:
    """Return whether weights may be quantized before they are gathered: frozen, and not still those of the teacher."""
    gathered_anew = config.sharding.strategy.reshards_after_forward or not objective.distills
    return config.train.params is Trainable.rotations and gathered_anew


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
    rates = {"optimizer.lr": rotates, "adamw.lr": weighs}
    clipped = weighs or (rotates and config.optimizer.uses_gradient_length)
    rates["train.max_grad_norm"] = clipped and config.train.max_grad_norm is not None
    return [key for key, acts in rates.items() if acts]


def _is_due(step: int, every: int | None, config: Config) -> bool:
    """Return whether what is done every so many steps, and after the last, is due; None is never."""
    return every is not None and (step == config.train.steps or step % every == 0)


def _loader(blocks: TokenBlocks, config: Config, accelerator: Accelerator, world_size: int, first_step: int) -> Any:
    sampler = BlockSampler(
        len(blocks),
        global_batch_size=config.data.global_batch_size,
        steps=config.train.steps,
        seed=config.seed,
        first_step=first_step,
    )
    ranks = config.sharding.ranks(world_size)
    micro = micro_batch_size(config, world_size=world_size)
    # Without a generator of its own the loader would draw from torch's stream, once a session and not once a run.
    own = torch.Generator().manual_seed(config.seed)
    loader = DataLoader(BlockDataset(blocks), batch_size=micro * ranks, sampler=sampler, drop_last=True, generator=own)
    if ranks == world_size:
        return accelerator.prepare_data_loader(loader)
    place: dict[str, Any] = {"device": accelerator.device, "put_on_device": True, "split_batches": True}
    return prepare_data_loader(loader, num_processes=ranks, process_index=0, **place)


def _refresh(model: RotatedModel, config: Config, step: int) -> None:
    if step % config.quant.refresh_every == 0:
        model.refresh_quantizers()


class _Meter:
    """Measures steps."""

    def __init__(
        self,
        state: TrainingState,
        config: Config,
        coordinator: Coordinator,
        guard: UnshardGuard | None,
        utilization: Utilization | None,
    ) -> None:
        self.guard = guard
        self.utilization = utilization
        self.seen: tuple[float, ...] = self._guard_totals()
        self.state = state
        self.config = config
        self.coordinator = coordinator
        self.data_seconds = 0.0
        self.began = self.step_began = time.perf_counter()
        self.before = state.result.seconds
        self.sent = self._sent()

    @property
    def seconds(self) -> float:
        """What training took, over all sessions."""
        return self.before + time.perf_counter() - self.began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens in the block out of the figures of the step and of training."""
        began, sent, seen = time.perf_counter(), self._sent(), self._guard_totals()
        yield
        seconds = time.perf_counter() - began
        self.began, self.step_began = self.began + seconds, self.step_began + seconds
        self.sent = _later(self.sent, sent, self._sent())
        self.seen = _later(self.seen, seen, self._guard_totals())

    def timed(self, batches: Any) -> Iterator[Tensor]:
        """Pass batches on, adding up the time that waiting for them takes."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            with part("data"):
                batch = next(iterator, None)
            self.data_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def row(self, step: int, *, loss: float, norms: Norms) -> dict[str, float]:
        """Return the metrics of the step that ends now, and begin the next."""
        config, communication = self.config, self.coordinator.communication
        seconds = time.perf_counter() - self.step_began
        tokens = tokens_per_step(config, world_size=communication.world_size)
        row: dict[str, float] = {
            "train/loss": loss,
            "train/tokens": step * tokens,
            "train/device_hours": self.state.result.seconds * communication.world_size / 3600.0,
            "train/num_skipped": len(self.state.result.skipped),
            "grad_norm/total": norms.total.item(),
            "grad_norm/rotations": norms.rotations.item(),
            "throughput/tokens_per_s": tokens / seconds,
            "throughput/tokens_per_s_per_device": tokens / seconds / communication.world_size,
            "time/step_s": seconds,
            "time/data_s": self.data_seconds,
            **self._guard_row(),
        }
        if self.utilization is not None:
            figures = self.utilization.figures(row["throughput/tokens_per_s_per_device"])
            row |= {f"throughput/{figure}": value for figure, value in figures.items()}
        if norms.weights is not None:
            row["grad_norm/weights"] = norms.weights.item()
        if step % config.metrics.divergence_every == 0 or step == config.train.steps:
            divergence = self.coordinator.divergence()
            self.coordinator.settle(divergence, config.metrics.on_divergence, step=step)
            row |= {"replica/max_abs_diff": divergence.max_abs_diff, "replica/num_divergent": len(divergence.names)}
        if step % config.metrics.rotation_every == 0 or step == config.train.steps:
            row |= rotation_metrics(self.state.model.bank.snapshot(), self.state.start)
        before, self.sent = self.sent, self._sent()
        row |= {"comm/num_collectives": self.sent[0] - before[0], "comm/bytes": self.sent[1] - before[1]}
        self.data_seconds, self.step_began = 0.0, time.perf_counter()
        return row

    def _sent(self) -> tuple[float, ...]:
        communication = self.coordinator.communication
        return communication.num_collectives, communication.num_bytes

    def _guard_totals(self) -> tuple[float, ...]:
        counts = self.guard.counts if self.guard else GuardCounts()
        return counts.num_unshards, counts.barriers, counts.seconds

    def _guard_row(self) -> dict[str, float]:
        before, self.seen = self.seen, self._guard_totals()
        unshards, barriers, seconds = (now - then for now, then in zip(self.seen, before, strict=True))
        return {"sync/num_unshards": unshards, "sync/num_barriers": barriers, "time/sync_s": seconds}


def _later(mark: tuple[float, ...], before: tuple[float, ...], after: tuple[float, ...]) -> tuple[float, ...]:
    """Return a mark on running totals, moved by how far these went on."""
    return tuple(at + now - then for at, then, now in zip(mark, before, after, strict=True))
