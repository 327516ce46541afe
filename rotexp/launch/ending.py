"""How the end of a run is recorded, also by a process that was told to end and is stuck."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from rotexp.config.composition import resolved_yaml
from rotexp.config.schema import Config
from rotexp.errors.library import is_out_of_memory
from rotexp.files.folders import write_atomically
from rotexp.process.exit_codes import DONE, FAILED, leave_at_once
from rotexp.process.outer import is_first
from rotexp.process.saying import tell
from rotexp.process.signals import Interrupted, StopRequest
from rotexp.runfolder.checkpoint_folders import find_checkpoint
from rotexp.runfolder.layout import CONFIG_FILE, RANK_LOGS
from rotexp.runfolder.records import readable_summary, write_summary


def recorded(config: Config, folder: Path, run: Callable[[], None], *, stop: StopRequest) -> int:
    """Run, and leave in the folder how it ended; return the exit code.

    Args:
        stop: what takes the signals; what fails after one of them is a part of the interruption, such as a collective
            whose peers have ended.
    """
    try:
        if is_first():
            write_atomically(folder / CONFIG_FILE, resolved_yaml(config))
            write_summary(folder, {"status": "running", "error": None})
        run()
    except Interrupted as interruption:
        return _interrupted(folder, interruption)
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        message = f"SystemExit: {message}" if isinstance(error, SystemExit) else message
        if stop.signal is not None:
            return _interrupted(folder, Interrupted(stop.signal, f"then {message}"))
        record_end(folder, "oom" if is_out_of_memory(error) else "failed", message)
        return FAILED
    return DONE


def _interrupted(folder: Path, interruption: Interrupted) -> int:
    """Record it, unless a node did so before it killed the ranks that this one then missed."""
    if readable_summary(folder).get("status") != "interrupted":
        record_end(folder, "interrupted", str(interruption))
    return interruption.exit_code


def record_end(folder: Path, status: str, message: str) -> None:
    """Say on standard error, and in the summary unless a rank said so before, how a run ended.

    A full disk must not hide the first error.
    """
    shown = folder if Path.cwd() == folder else os.path.relpath(folder)  # hydra.job.chdir=true
    tell(f"the run {status}: {message} (see {shown}/{RANK_LOGS})")
    try:
        summary = readable_summary(folder)
        if summary.get("status", "running") == "running":
            write_summary(folder, {**summary, "status": status, "error": message})
    except OSError as disk:
        tell(f"hydra.run.dir={folder}: cannot be written ({disk}); free space or choose another")


def out_of_time(came: Sequence[int], config: Config, folder: Path | None) -> Interrupted:
    """Return what ended a run that was killed because it had not ended in time after these signals."""
    if signal.SIGINT in came:
        return Interrupted(signal.SIGINT)
    found = None if folder is None else find_checkpoint(folder).path
    left = "no checkpoint was saved" if found is None else f"the newest checkpoint is {found.name}"
    return Interrupted(came[0], f"launch.grace_seconds={config.launch.grace_seconds:g} ran out; {left}")


class LastResort:
    """Ends this process where it has not ended in time after a signal, and records that.

    Attributes:
        folder: where it is recorded (None: the run has no folder yet).
    """

    def __init__(self, config: Config, folder: Path | None = None, *, more_seconds: float = 0.0) -> None:
        """Wait `launch.grace_seconds` and perhaps more."""
        self.folder = folder
        self._config = config
        self._seconds = config.launch.grace_seconds + more_seconds

    def act(self, came: Sequence[int], seconds: float) -> None:
        """End the process if so many seconds after the first signal are too many; for a thread, as in `watched`."""
        if seconds < self._seconds:
            return
        interruption = out_of_time(came, self._config, self.folder)
        if self.folder is None:
            tell(interruption)
        else:
            record_end(self.folder, "interrupted", str(interruption))
        leave_at_once(interruption.exit_code)
