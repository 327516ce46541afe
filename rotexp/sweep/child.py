"""One job as a child process: the main command with a configuration that is already resolved."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from rotexp.config.composition import resolved_yaml
from rotexp.config.schema import Config
from rotexp.process.signals import end_with_parent
from rotexp.runfolder.layout import JOB_LOG_FILE, SUMMARY_FILE
from rotexp.sweep.outcome import Ending, Job


class Child:
    """A running job."""

    def __init__(self, job: Job, config: Config, configs: Path, *, variables: Mapping[str, str], log: bool) -> None:
        """Start it.

        Args:
            config: the job's, adapted to this machine.
            configs: a folder for the file of it.
            variables: added to its environment.
            log: whether its output goes to a file in its folder.
        """
        self.job = job
        self._said = ""
        self._began = time.monotonic()
        self._summary_before = _changed(job.folder / SUMMARY_FILE)
        self._kills_before = _kills_for_memory()
        self._log: IO[bytes] | None = None
        if log:
            job.folder.mkdir(parents=True, exist_ok=True)
            self._log = (job.folder / JOB_LOG_FILE).open("ab")
        (configs / f"{job.name}.yaml").write_text(runnable(config, job.folder), encoding="utf-8")
        sys.stdout.flush()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rotexp.train"),
                *("--config-dir", str(configs), "--config-name", f"{job.name}.yaml"),
                *([f"plugins=[{','.join(config.plugins)}]"] if config.plugins else []),
            ],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes to the sweep, which passes it on once
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # noqa: PLW1509 (no threads here); it may then save
        )
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)

    def listen(self, *, seconds: float) -> None:
        """Pass on what the job says on standard error, waiting that long for something."""
        assert self.process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stderr, selectors.EVENT_READ)
            if selector.select(seconds):
                text = self.process.stderr.read() or b""
                self._said = (self._said + text.decode(errors="replace"))[-10_000:]
                sink = self._log or sys.stderr.buffer
                sink.write(text)
                sink.flush()
                if not text:
                    time.sleep(seconds)  # closed, but the process has not ended yet

    def interrupt(self) -> None:
        """Ask the job to end, which lets it save what it has."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the job and every process of it that is left, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Leave nothing of the job behind but its folder."""
        self.kill()
        if self._log is not None:
            self._log.close()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def ending(self) -> Ending | None:
        """Return how the process ended, None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        self.listen(seconds=0)
        said = [line.removeprefix("rotexp: ") for line in self._said.splitlines() if line.startswith("rotexp: ")]
        return Ending(
            code=code,
            seconds=time.monotonic() - self._began,
            said=said[-1] if said else None,
            written=_changed(self.job.folder / SUMMARY_FILE) != self._summary_before,
            out_of_memory=_kills_for_memory() > self._kills_before,
        )


def runnable(config: Config, folder: Path) -> str:
    """Return the YAML from which the main command runs a job in its folder."""
    escaped = json.dumps(str(folder.resolve())).replace("${", "\\\\${")
    return f"{resolved_yaml(config)}hydra:\n  run:\n    dir: {escaped}\n"


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _kills_for_memory() -> int:
    """Return how many processes Linux has killed since it started because memory was short."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill "))
