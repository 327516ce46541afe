"""One job as a child process: the main command with a configuration that is already resolved."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from rotexp.config.schema import Config
from rotexp.launch.beside import end, start
from rotexp.process.saying import told
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
        environment = os.environ | variables
        self.process = start(config, job.folder, configs, name=job.name, variables=environment, stdout=self._log)
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
        end(self.process)

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
        said = [line for line in map(told, self._said.splitlines()) if line is not None]
        return Ending(
            code=code,
            seconds=time.monotonic() - self._began,
            said=said[-1] if said else None,
            written=_changed(self.job.folder / SUMMARY_FILE) != self._summary_before,
            out_of_memory=_kills_for_memory() > self._kills_before,
        )


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _kills_for_memory() -> int:
    """Return how many processes Linux has killed since it started because memory was short."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill "))
