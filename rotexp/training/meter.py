"""What a training step costs: time, tokens, collectives, the guard's waits, and how replicas and rotations are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rotexp.config.schema import Config
from rotexp.metrics.flops import Utilization
from rotexp.metrics.profiler import part
from rotexp.metrics.rotations import rotation_metrics
from rotexp.sharding.guard import GuardCounts, UnshardGuard
from rotexp.sharding.replicas import Divergence
from rotexp.training.batches import tokens_per_step
from rotexp.training.coordinator import Coordinator, Norms
from rotexp.training.state import TrainingState


class Meter:
    """Measures steps.

    Attributes:
        divergence: of replicas when they were compared last, before what differed was overwritten.
    """

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
        self.divergence = Divergence()
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
            self.divergence = divergence = self.coordinator.divergence()
            if self.coordinator.settle(divergence, config.metrics.on_divergence, step=step):
                self.state.model.refresh_quantizers()
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
