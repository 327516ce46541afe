"""The W&B mirror of a run; whatever W&B does, the run goes on unchanged."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rotexp.config import TrackerConfig, WandbMode
from rotexp.metrics.keys import METRICS, wandb_pattern
from rotexp.tracking.files import finite

LOGGER = logging.getLogger(__name__)

INIT_SECONDS = 30.0
FINISH_SECONDS = 60.0


class WandbMirror:
    """Sends rows to W&B, online or to an offline run in the folder; the first failure is said once and ends it."""

    def __init__(self, config: TrackerConfig, folder: Path, *, plain_config: Mapping[str, Any]) -> None:
        self._run: Any = None
        self._given_up = False
        self._guarded(lambda: self._open(config, folder, plain_config), seconds=2 * INIT_SECONDS)

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Send the metrics of a step."""
        if self._run is not None:
            self._guarded(lambda: self._run.log(dict(row), step=step), seconds=FINISH_SECONDS)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """Send the end state, and wait for W&B to take it, but not for long."""
        run, self._run = self._run, None
        if run is not None:

            def end() -> None:
                run.summary.update(finite(summary))
                run.finish(exit_code=exit_code)

            self._guarded(end, seconds=FINISH_SECONDS)

    def _open(self, config: TrackerConfig, folder: Path, plain_config: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = resolve_mode(config.mode)
        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS)
        run = wandb.init(
            dir=folder,
            project=config.project,
            name=config.run_name or folder.name,
            config=dict(plain_config),
            mode=mode,
            settings=settings,
        )
        for metric in METRICS:
            summary = None if "*" in wandb_pattern(metric) else metric.summary
            run.define_metric(wandb_pattern(metric), summary=summary)
        if not self._given_up:
            self._run = run

    def _guarded(self, call: Callable[[], object], *, seconds: float) -> None:
        """Run a call of W&B's aside, for so long; on failure or delay say so once and stop mirroring."""
        failure: list[BaseException] = []

        def attempt() -> None:
            try:
                call()
            except Exception as error:  # W&B must never end a run
                failure.append(error)

        thread = threading.Thread(target=attempt, name="wandb", daemon=True)
        thread.start()
        thread.join(seconds)
        if failure or thread.is_alive():
            self._run, self._given_up = None, True
            reason = failure[0] if failure else f"no answer within {seconds:.0f} s"
            LOGGER.warning("W&B: %s; the run goes on without it, metrics.jsonl holds everything", reason)


def resolve_mode(mode: WandbMode) -> str:
    """Return W&B's own mode name; `auto` is online when a key is present (environment or netrc), else offline."""
    if mode is not WandbMode.auto:
        return mode.name
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    from requests.utils import get_netrc_auth

    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None
