"""The W&B mirror of a run; whatever W&B does, the run goes on unchanged."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rotexp.errors.library import reason
from rotexp.metrics.keys import find_metric
from rotexp.runfolder.layout import CONFIG_FILE, ROTATIONS_FILE, WANDB_FOLDER
from rotexp.runfolder.records import finite
from rotexp.tracking.limits import ONLINE
from rotexp.tracking.naming import artifact_name, display_name, mirrored_config, place_in_group, tags
from rotexp.tracking.options import TrackerConfig, WandbMode
from rotexp.tracking.tracker import TrackedRun

LOGGER = logging.getLogger(__name__)

INIT_SECONDS = 30.0
FINISH_SECONDS = 60.0
UPLOAD_BYTES_PER_S = 2**20
"""The slowest connection for which the end of a run waits until its artifact is uploaded."""

FOREIGN_SERVICE = "WANDB_SERVICE"
"""The variable in which a process that has a W&B run leaves to its children the address of what serves it; theirs may
be gone, or of another version, and then not even an offline run is opened. Ours serves itself."""

ROTATIONS = "rotations"
"""The end state's rows of figures, one a rotation, which W&B shows as a table; and the type of their artifact."""

ARTIFACT_FILES = (ROTATIONS_FILE, CONFIG_FILE)


class WandbMirror:
    """Sends rows to W&B, online or to an offline run in the folder, on a thread of its own that nobody waits for.

    A call that fails is said once, and those after it are made all the same; one that hangs delays them, and the run's
    end no longer than `FINISH_SECONDS`. Where W&B cannot be reached at first, the run is recorded offline.

    Attributes:
        fell_back: whether it was.
    """

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
        self.fell_back = False
        self._given_up = False
        self._failures: list[str] = []
        self._folder = folder
        self._logged_to = logged_to if run_id else -1  # a new run has seen nothing
        self._defined: set[str] = set()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._make_calls, name="wandb", daemon=True)
        self._thread.start()
        self._calls.put(lambda: self._open(config, plain_config, run_id))
        seconds = 3 * INIT_SECONDS
        answered = self._wait(seconds=seconds)
        if self._run is None:
            self._give_up(self._failures[0] if answered else _no_answer(seconds))

    @property
    def run_id(self) -> str | None:
        """What W&B calls the run; None when it was given up."""
        return None if self._given_up else self._run_id

    def complete(self) -> bool:
        """Wait, but not for long, until what was sent has been taken; return whether all of it was."""
        return not self._given_up and self._wait(seconds=FINISH_SECONDS) and not self._failures

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Send the metrics of a step, unless W&B saw them before the run was resumed."""
        at, kept = self._new_step(row, step), dict(row)
        if at is not None and not self._given_up:
            self._calls.put(lambda: self._send(kept, at))

    def finish(self, summary: Mapping[str, Any], *, exit_code: int) -> None:
        """Send the end state, its rotations as a table and their file, and wait for W&B, but not for long."""
        if self._given_up:
            return
        run = self._run
        files = [path for name in ARTIFACT_FILES if (path := self._folder / name).is_file()] if not exit_code else []
        figures = {name: value for name, value in summary.items() if name != ROTATIONS}
        self._calls.put(lambda: run.summary.update(finite(figures)))
        self._calls.put(lambda: _send_table(run, summary.get(ROTATIONS) or []))
        self._calls.put(lambda: _send_files(run, files))
        self._calls.put(lambda: run.finish(exit_code=exit_code))
        self._calls.put(None)
        seconds = FINISH_SECONDS + sum(path.stat().st_size for path in files) / UPLOAD_BYTES_PER_S
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._give_up(_no_answer(seconds))

    def _open(self, config: TrackerConfig, plain_config: Mapping[str, Any], run_id: str | None) -> None:
        mode = resolve_mode(config.mode)
        try:
            run = self._init(config, plain_config, run_id, mode=mode)
        except Exception as error:  # of the network, or the account
            if mode not in ONLINE:
                raise
            remedy = f"recorded offline, python -m rotexp.upload {self._folder} uploads it"
            LOGGER.warning("W&B: %s; %s", reason(error), remedy)
            run = self._init(config, plain_config, run_id, mode="offline")
            self.fell_back = True
        if not self._given_up:
            self._run, self._run_id = run, run.id

    def _init(self, config: TrackerConfig, plain_config: Mapping[str, Any], run_id: str | None, *, mode: Any) -> Any:
        import wandb

        os.environ.pop(FOREIGN_SERVICE, None)
        place = place_in_group(self._folder, config.group)
        return wandb.init(
            dir=self._folder,
            project=config.project,
            entity=config.entity,
            group=config.group,
            job_type=config.job_type,
            tags=tags(plain_config),
            name=config.run_name or display_name(plain_config, folder=place),
            config=mirrored_config(plain_config),
            id=run_id,
            resume="allow" if run_id else None,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS),
        )

    def _new_step(self, row: Mapping[str, float], step: int) -> int | None:
        """Return the step at which to send a row; None for one that W&B saw.

        A phase may follow the last step that W&B saw, which it takes no more rows for: its row goes one step on.
        """
        if step > self._logged_to:
            return step
        return None if step < self._logged_to or "train/loss" in row else step + 1

    def _send(self, row: dict[str, float], step: int) -> None:
        try:
            for key in row.keys() - self._defined:
                self._define(key)
        finally:
            self._run.log(row, step=step)

    def _define(self, key: str) -> None:
        """Define a series when it is first met, by its whole name: of several patterns W&B takes the first alone."""
        self._defined.add(key)
        if metric := find_metric(key):
            self._run.define_metric(key, step_metric="_step", step_sync=False, summary=metric.wandb_summary)

    def _make_calls(self) -> None:
        """Make the calls that are asked for, one after the other; none that fails ends the run or the mirror."""
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # W&B must never end a run
                self._failures.append(reason(error))
                if self._run is not None and len(self._failures) == 1:
                    LOGGER.warning("W&B: %s; what it did not take is missing there, %s", reason(error), self._remedy)

    def _wait(self, *, seconds: float) -> bool:
        """Wait until every call asked for so far is made; return whether it was."""
        made = threading.Event()
        self._calls.put(made.set)
        return made.wait(seconds)

    def _give_up(self, cause: str) -> None:
        self._given_up = True
        self._calls.put(None)
        LOGGER.warning("W&B: %s; the run goes on without it, %s", cause, self._remedy)

    @property
    def _remedy(self) -> str:
        return f"metrics.jsonl holds everything, python -m rotexp.upload --rebuild {self._folder} sends it anew"


def _no_answer(seconds: float) -> str:
    return f"no answer within {seconds:.0f} s"


def _send_table(run: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Show the rotations' figures as a table."""
    import wandb

    if rows:
        run.summary[ROTATIONS] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])


def _send_files(run: Any, files: Sequence[Path]) -> None:
    """Keep the rotations' file with the configuration that made it."""
    import wandb

    if any(path.name == ROTATIONS_FILE for path in files):
        artifact = wandb.Artifact(artifact_name(run.id, kind=ROTATIONS), type=ROTATIONS)
        for path in files:
            artifact.add_file(str(path.resolve()), policy="immutable", skip_cache=True)  # no copy outside the folder
        run.log_artifact(artifact)


def open_mirror(run: TrackedRun, *, config: TrackerConfig) -> WandbMirror:
    """Mirror a run; where earlier sessions recorded it offline, one offline run then holds its whole history."""
    earlier = offline_runs(run.folder)
    mirror = WandbMirror(
        config,
        run.folder,
        plain_config=run.plain_config,
        run_id=run.run_id,
        logged_to=-1 if earlier else run.logged_to,
    )
    if earlier:
        _record_again(mirror, run, earlier)
    return mirror


def _record_again(mirror: WandbMirror, run: TrackedRun, earlier: Sequence[Path]) -> None:
    """Send the rows so far, and remove the runs that held them."""
    for step, row in run.history():
        mirror.log(row, step=step)
    if mirror.complete():
        for folder in earlier:
            shutil.rmtree(folder, ignore_errors=True)


def resolve_mode(mode: WandbMode) -> str:
    """Return W&B's own mode name; `auto` is online when a key is present (environment or netrc), else offline."""
    if mode is not WandbMode.auto:
        return mode.name
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if has_key() else "offline"


def offline_runs(folder: Path) -> list[Path]:
    """Return the offline runs in a run's folder."""
    return sorted((folder / WANDB_FOLDER).glob("offline-run-*"))


def has_key() -> bool:
    """Return whether somebody is logged in to W&B on this machine."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    from requests.utils import get_netrc_auth

    return get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")) is not None
