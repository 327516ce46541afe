"""The phases of a run: each named, timed, its memory measured; a failure carries its phase's name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rotexp.metrics.memory import peaks, reset_peaks
from rotexp.sharding.communication import Communication

LOGGER = logging.getLogger(__name__)


class PhaseError(Exception):
    """A failure inside a phase; its cause is the failure itself."""

    def __init__(self, phase: str, error: BaseException) -> None:
        super().__init__(f"phase {phase}: {type(error).__name__}: {error}")
        self.phase = phase


class Phases:
    """Runs phases and collects seconds and peak memory (maximum and minimum over ranks, GiB) of each."""

    def __init__(
        self,
        *,
        device: torch.device,
        communication: Communication,
        log: Callable[[dict[str, float]], None],
        begin: Callable[[str], None] = lambda _name: None,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        """Take what is told of each phase: its figures at its end, its name at its beginning.

        Args:
            before: what `so_far` returned in an earlier session of the same run.
        """
        self._device = device
        self._communication = communication
        self._log = log
        self._begin = begin
        before = before or {"memory": {}, "seconds": {}}
        self.memory: dict[str, dict[str, float]] = dict(before["memory"])
        self.seconds: dict[str, float] = dict(before["seconds"])
        self._now, self._since = "", 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run the block as the phase `name`.

        Raises:
            PhaseError: the block failed.
        """
        LOGGER.info("phase %s", name)
        self._begin(name)
        reset_peaks(self._device)
        self._now, self._since = name, time.perf_counter()
        try:
            yield
        except (Exception, SystemExit) as error:  # a part of the user's own may call sys.exit
            raise PhaseError(name, error) from error
        self.memory, self.seconds = self.so_far().values()
        memory = {f"memory/{name}/{figure}": value for figure, value in self.memory[name].items()}
        self._log({f"time/{name}_s": self.seconds[name], **memory})

    def so_far(self) -> dict[str, dict[str, Any]]:
        """Return `memory` and `seconds` of all phases, with what the present one has come to (a collective).

        Sessions of one run add up their seconds; of their peaks the highest counts, and the lowest of the lowest.
        """
        name, spread = self._now, self.spread()
        known = self.memory.get(name, spread)
        peaks = {
            key: (max if key.endswith("_max") else min)(value, known.get(key, value)) for key, value in spread.items()
        }
        seconds = self.seconds.get(name, 0.0) + time.perf_counter() - self._since
        return {"memory": self.memory | {name: peaks}, "seconds": self.seconds | {name: seconds}}

    def spread(self) -> dict[str, float]:
        """Return the peaks since the present phase began, `_max` and `_min` over ranks (a collective)."""
        figures = peaks(self._device)
        values = torch.tensor(list(figures.values()), dtype=torch.float64, device=self._device)
        largest = self._communication.reduce_(torch.stack([values, -values]), "max")
        return {
            f"{name}_{side}": value
            for side, row in (("max", largest[0]), ("min", -largest[1]))
            for name, value in zip(figures, row.tolist(), strict=True)
        }
