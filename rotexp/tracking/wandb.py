"""The W&B mirror of a run; whatever W&B does, the run goes on unchanged."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rotexp.config import TrackerConfig, WandbMode
from rotexp.metrics.keys import find_metric
from rotexp.tracking.files import finite
from rotexp.tracking.naming import display_name, mirrored_config, tags

LOGGER = logging.getLogger(__name__)

INIT_SECONDS = 30.0
FINISH_SECONDS = 60.0
UPLOAD_BYTES_PER_S = 2**20
"""The slowest connection for which the end of a run waits until its artifact is uploaded."""

ROTATIONS = "rotations"
"""The end state's rows of figures, one a rotation, which W&B shows as a table; and the type of their artifact."""

ARTIFACT_FILES = ("rotations.safetensors", "config.resolved.yaml")


class WandbMirror:
    """Sends rows to W&B, online or to an offline run in the folder; the first failure is said once and ends it."""

    def __init__(
        self,
        config: TrackerConfig,
        folder: Path,
        *,
        plain_config: Mapping[str, Any],
        run_id: str | None = None,
        logged_to: int = -1,
    ) -> None:
        """Open a W&B run.

        Args:
            plain_config: the whole configuration as nested dicts.
            run_id: the W&B run that this one goes on with.
            logged_to: the last step that W&B saw of that run.
        """
        self._run: Any = None
        self._run_id: str | None = None
        self._given_up = False
        self._folder = folder
        self._logged_to = logged_to if run_id else -1  # a new run has seen nothing
        self._defined: set[str] = set()
        self._guarded(lambda: self._open(config, plain_config, run_id), seconds=2 * INIT_SECONDS)

    @property
    def run_id(self) -> str | None:
        """What W&B calls the run; None when it was given up."""
        return None if self._given_up else self._run_id

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Send the metrics of a step, unless W&B saw them before the run was resumed."""
        at = self._new_step(row, step)
        if self._run is not None and at is not None:
            self._guarded(lambda: self._send(row, at), seconds=FINISH_SECONDS)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """Send the end state, its rotations as a table and their file, and wait for W&B, but not for long."""
        run, self._run = self._run, None
        if run is None:
            return
        files = [path for name in ARTIFACT_FILES if (path := self._folder / name).is_file()] if not exit_code else []

        def end() -> None:
            try:
                figures = {name: value for name, value in summary.items() if name != ROTATIONS}
                run.summary.update(finite(figures))
                _send_rotations(run, summary.get(ROTATIONS) or [], files)
            finally:
                run.finish(exit_code=exit_code)

        upload = sum(path.stat().st_size for path in files) / UPLOAD_BYTES_PER_S
        self._guarded(end, seconds=FINISH_SECONDS + upload)

    def _open(self, config: TrackerConfig, plain_config: Mapping[str, Any], run_id: str | None) -> None:
        import wandb

        mode: Any = resolve_mode(config.mode)
        run = wandb.init(
            dir=self._folder,
            project=config.project,
            entity=config.entity,
            group=config.group,
            job_type=config.job_type,
            tags=tags(plain_config),
            name=config.run_name or display_name(plain_config, folder=self._folder.name),
            config=mirrored_config(plain_config),
            id=run_id,
            resume="allow" if run_id else None,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS),
        )
        if not self._given_up:
            self._run, self._run_id = run, run.id

    def _new_step(self, row: Mapping[str, float], step: int) -> int | None:
        """Return the step at which to send a row; None for one that W&B saw.

        A phase may follow the last step that W&B saw, which it takes no more rows for: its row goes one step on.
        """
        if step > self._logged_to:
            return step
        return None if step < self._logged_to or "train/loss" in row else step + 1

    def _send(self, row: Mapping[str, float], step: int) -> None:
        for key in row.keys() - self._defined:
            self._define(key)
        self._run.log(dict(row), step=step)

    def _define(self, key: str) -> None:
        """Define a series when it is first met, by its whole name: of several patterns W&B takes the first alone."""
        self._defined.add(key)
        if metric := find_metric(key):
            self._run.define_metric(key, step_metric="_step", step_sync=False, summary=metric.wandb_summary)

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
            reason = " ".join(str(failure[0]).split()) if failure else f"no answer within {seconds:.0f} s"
            LOGGER.warning("W&B: %s; the run goes on without it, metrics.jsonl holds everything", reason)


def _send_rotations(run: Any, rows: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> None:
    """Show the rotations' figures as a table, and keep their file with the configuration that made it."""
    import wandb

    if rows:
        run.summary[ROTATIONS] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    if any(path.name == ARTIFACT_FILES[0] for path in files):
        artifact = wandb.Artifact(f"{ROTATIONS}-{run.id}", type=ROTATIONS)
        for path in files:
            artifact.add_file(str(path.resolve()), policy="immutable", skip_cache=True)  # no copy outside the folder
        run.log_artifact(artifact)


def resolve_mode(mode: WandbMode) -> str:
    """Return W&B's own mode name; `auto` is online when a key is present (environment or netrc), else offline."""
    if mode is not WandbMode.auto:
        return mode.name
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if has_key() else "offline"


def offline_runs(folder: Path) -> list[Path]:
    """Return the offline runs in a run's folder."""
    return sorted((folder / "wandb").glob("offline-run-*"))


def has_key() -> bool:
    """Return whether somebody is logged in to W&B on this machine."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    from requests.utils import get_netrc_auth

    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None
