"""The training loop: batch, forward, backward, consolidate, clip, step, log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import get_scheduler

from rotexp.config import Config
from rotexp.data.blocks import BlockDataset, BlockSampler, TokenBlocks
from rotexp.metrics.profiler import StepProfiler, part
from rotexp.metrics.rotations import rotation_metrics
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.communication import Communication
from rotexp.sync.guard import GuardCounts, UnshardGuard
from rotexp.targets import build
from rotexp.training.coordinator import Coordinator, Divergence, Norms

Log = Callable[[int, dict[str, float]], None]
"""Takes a step, counted from 1, and its metrics."""


@dataclass
class TrainResult:
    """The losses of all steps in nats, how long they took in seconds, how far replicas were apart after the last."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    divergence: Divergence = field(default_factory=Divergence)


def micro_batch_size(config: Config, *, world_size: int) -> int:
    """Return how many blocks a rank takes at once."""
    return config.train.micro_batch_size or config.data.global_batch_size // world_size


def train(
    model: RotatedModel,
    blocks: TokenBlocks,
    config: Config,
    *,
    accelerator: Accelerator,
    communication: Communication,
    log: Log,
    guard: UnshardGuard | None = None,
    profiler: StepProfiler | None = None,
) -> TrainResult:
    """Train the model's rotations on token blocks (blocks, tokens), and project them onto the orthogonal group.

    Raises:
        FloatingPointError: the loss is not finite; all ranks raise alike.
    """
    coordinator = Coordinator(model.network, communication)
    optimizer, scheduler = _optimizer(model, config)
    objective = build(config.objective)
    meter = _Meter(model, config, coordinator, guard)
    result = TrainResult()
    model.refresh_quantizers()  # what was searched until now belongs to other rotations
    began = time.perf_counter()
    with model.mode.set(rotate=True, quantize=True):
        share = torch.zeros((), device=accelerator.device)
        for token_ids in meter.timed(_loader(blocks, config, accelerator, communication.world_size)):
            with accelerator.accumulate():
                with part("forward"):
                    loss = objective(model, token_ids)
                with part("backward"):
                    accelerator.backward(loss)
                share += loss.detach() / accelerator.gradient_accumulation_steps
            if not accelerator.sync_gradients:
                continue
            with part("consolidate"):
                mean_loss = coordinator.consolidate(share).item()
            _require_finite(mean_loss, step=len(result.losses) + 1)
            with communication.equal_threads():
                with part("clip"):
                    norms = coordinator.clip(config.train.max_grad_norm)
                with part("optimizer"):
                    optimizer.step()
            learning_rate = scheduler.get_last_lr()[0]
            scheduler.step()
            optimizer.zero_grad()
            share = torch.zeros_like(share)
            result.losses.append(mean_loss)
            step = len(result.losses)
            _refresh(model, config, step)
            with part("metrics"):
                row = meter.row(step, loss=mean_loss, norms=norms, learning_rate=learning_rate)
                if step % config.train.log_every == 0 or step == config.train.steps:
                    log(step, row)
            if profiler is not None:
                profiler.step()
        result.divergence = coordinator.divergence()  # before the broadcast, after which it could only be zero
        optimizer.project()
        coordinator.broadcast()
    result.seconds = time.perf_counter() - began
    return result


def _optimizer(model: RotatedModel, config: Config) -> tuple[Any, Any]:
    optimizer = build(config.optimizer, [matrix for _, matrix in model.bank.items()])
    scheduler = get_scheduler(
        config.train.lr_schedule.name,
        optimizer,
        num_warmup_steps=config.train.warmup_steps,
        num_training_steps=config.train.steps,
    )
    return optimizer, scheduler


def _loader(blocks: TokenBlocks, config: Config, accelerator: Accelerator, world_size: int) -> Any:
    size = config.data.global_batch_size
    sampler = BlockSampler(len(blocks), global_batch_size=size, steps=config.train.steps, seed=config.seed)
    micro = micro_batch_size(config, world_size=world_size)
    loader = DataLoader(BlockDataset(blocks), batch_size=micro * world_size, sampler=sampler, drop_last=True)
    return accelerator.prepare_data_loader(loader)


def _refresh(model: RotatedModel, config: Config, step: int) -> None:
    if step % config.quant.refresh_every == 0:
        model.refresh_quantizers()


def _require_finite(loss: float, *, step: int) -> None:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss of step {step} is {loss}: lower optimizer.lr or train.max_grad_norm")


class _Meter:
    """Measures steps."""

    def __init__(
        self, model: RotatedModel, config: Config, coordinator: Coordinator, guard: UnshardGuard | None
    ) -> None:
        self.guard = guard
        self.seen = self._guard_totals()
        self.model = model
        self.config = config
        self.coordinator = coordinator
        self.start = model.bank.snapshot()
        self.data_seconds = 0.0
        self.step_began = time.perf_counter()
        self.sent = self._sent()

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

    def row(self, step: int, *, loss: float, norms: Norms, learning_rate: float) -> dict[str, float]:
        """Return the metrics of the step that ends now, and begin the next."""
        config, communication = self.config, self.coordinator.communication
        seconds = time.perf_counter() - self.step_began
        tokens = config.data.global_batch_size * config.data.sequence_length
        row: dict[str, float] = {
            "train/loss": loss,
            "train/lr": learning_rate,
            "train/tokens": step * tokens,
            "grad_norm/total": norms.total.item(),
            "grad_norm/rotations": norms.rotations.item(),
            "throughput/tokens_per_s": tokens / seconds,
            "throughput/tokens_per_s_per_device": tokens / seconds / communication.world_size,
            "time/step_s": seconds,
            "time/data_s": self.data_seconds,
            **self._guard_row(),
        }
        if norms.weights is not None:
            row["grad_norm/weights"] = norms.weights.item()
        if step % config.metrics.divergence_every == 0 or step == config.train.steps:
            divergence = self.coordinator.divergence()
            self.coordinator.settle(divergence, config.metrics.on_divergence, step=step)
            row |= {"replica/max_abs_diff": divergence.max_abs_diff, "replica/num_divergent": len(divergence.names)}
        if step % config.metrics.rotation_every == 0 or step == config.train.steps:
            row |= rotation_metrics(self.model.bank.snapshot(), self.start)
        before, self.sent = self.sent, self._sent()
        row |= {"comm/num_collectives": self.sent[0] - before[0], "comm/bytes": self.sent[1] - before[1]}
        self.data_seconds, self.step_began = 0.0, time.perf_counter()
        return row

    def _sent(self) -> tuple[int, int]:
        communication = self.coordinator.communication
        return communication.num_collectives, communication.num_bytes

    def _guard_totals(self) -> tuple[int, int, float]:
        counts = self.guard.counts if self.guard else GuardCounts()
        return counts.num_unshards, counts.barriers, counts.seconds

    def _guard_row(self) -> dict[str, float]:
        before, self.seen = self.seen, self._guard_totals()
        unshards, barriers, seconds = (now - then for now, then in zip(self.seen, before, strict=True))
        return {"sync/num_unshards": unshards, "sync/num_barriers": barriers, "time/sync_s": seconds}
