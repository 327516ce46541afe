"""Run from Python what the main command runs, in processes of its own.

A run chooses threads, deterministic kernels, signal handlers, logging and the devices of its process; one that is
stuck after a signal ends its process. None of it may happen to a notebook, so the command is started beside it, as a
sweep's jobs are. So a script needs no `if __name__ == "__main__"`, threads may start runs, and several may go on at
once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, NoReturn, TextIO

from rotexp.config.composition import to_config
from rotexp.config.schema import Config
from rotexp.face.configs import checked, composed, path_of, setting
from rotexp.face.result import RunResult
from rotexp.launch.beside import end, start
from rotexp.process.exit_codes import DONE, INTERRUPTED, WRONG_REQUEST
from rotexp.process.outer import adopt
from rotexp.process.saying import told
from rotexp.runfolder.layout import RANK_LOGS
from rotexp.runfolder.records import readable_summary

TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables by which Jupyter's kernels, among others, say that what they show is as good as a terminal."""

END = re.compile(r"the run (failed|oom|interrupted): (.*) \(see .*\)")
"""How it says that a run ended otherwise than well."""


class RunError(RuntimeError):
    """A run failed, or was ended by somebody else.

    Attributes:
        folder: what the run left, its last checkpoint and logs among it.
        status: failed, oom or interrupted.
        phase: in which phase (None: in none, or its process was killed).
        reason: in one line.
    """

    def __init__(self, folder: Path, status: str, reason: str) -> None:
        super().__init__(folder, status, reason)  # as they are, since pickle calls the class with them
        self.folder, self.status, self.reason = folder, status, reason
        found = re.search(r"\bphase (\w+):", reason)
        self.phase = None if found is None else found[1]
        self._where = f" (see {folder}/{RANK_LOGS})" if any(folder.glob(RANK_LOGS)) else ""

    def __str__(self) -> str:
        return f"the run {self.status}: {self.reason}{self._where}"


def run(request: Config | Sequence[str] = (), *, folder: str | Path | None = None) -> RunResult:
    """Train rotations as `python -m rotexp.train` does, wait for the end, and return what the run left.

    It goes on from the newest checkpoint of an unfinished run in the same folder, unless `resume=never`.

    Args:
        request: overrides as on the command line, or a configuration (`rotexp.load_config`, `dataclasses.replace`).
        folder: of the run (None: `hydra.run.dir`, by default `runs/DATE/TIME-xxxx` below the working folder).

    Raises:
        ValueError: the request is wrong; nothing was started or written then.
        RunError: the run failed; the folder holds what it left.
        KeyboardInterrupt: Ctrl-C; the run was ended, and its folder holds its last checkpoint.
    """
    config, chosen = _resolved(request, folder)
    _refuse_ranks(config)
    with TemporaryDirectory(prefix="rotexp-") as configs:
        code, said = _carry_out(config, chosen, Path(configs))
    return RunResult(chosen, plugins=config.plugins) if code == DONE else _fail(chosen, code, said)


def _resolved(request: Config | Sequence[str], folder: str | Path | None) -> tuple[Config, Path]:
    """Return the configuration and the folder that a request means."""
    overrides = () if isinstance(request, Config) else request
    with composed(overrides) as composition:
        given = setting(overrides, "hydra.run.dir")
        if folder is not None and given is not None:
            raise ValueError(f"{given}: the folder is given twice, also as folder={folder}; keep one")
        config = checked(request) if isinstance(request, Config) else to_config(composition.config)
    return config, path_of(composition.folder if folder is None else folder, key="folder")


def _refuse_ranks(config: Config) -> None:
    """Refuse what takes other processes than this machine's: they would not know of each other.

    Raises:
        ValueError: this process is a rank of an outer launcher, or several nodes are asked for.
    """
    if adopt() is not None:
        raise ValueError(
            "rotexp.run: this process is a rank that torchrun or srun started; let them start -m rotexp.train instead"
        )
    nodes = config.launch.nnodes
    if nodes > 1:
        raise ValueError(f"launch.nnodes={nodes}: must be 1 from Python; start python -m rotexp.train on each node")


def _carry_out(config: Config, folder: Path, configs: Path) -> tuple[int, list[str]]:
    """Run the command to its end; return its exit code, and the lines by which it said what was wrong."""
    shown = sys.stdout is sys.__stdout__  # in a terminal, with progress bars
    stdout = None if shown else subprocess.PIPE
    said: list[str] = []
    started: list[subprocess.Popen[bytes]] = []
    passing: list[Thread] = []
    try:
        variables = _variables(shown=shown)
        started.append(start(config, folder, configs, name="run", variables=variables, stdout=stdout))
        passing += _passing(started[0], said)
        started[0].wait()
    except KeyboardInterrupt:
        for process in started:
            process.send_signal(signal.SIGINT)
            process.wait()  # a second one ends all at once
        raise
    finally:
        for process in started:
            _end(process, passing)
    return started[0].returncode, said


def _end(process: subprocess.Popen[bytes], passing: Sequence[Thread]) -> None:
    """Leave nothing of a process: none that it started, no thread, no pipe."""
    end(process)
    for thread in passing:
        thread.join()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _passing(process: subprocess.Popen[bytes], said: list[str]) -> Iterator[Thread]:
    """Yield threads, each as soon as it runs, that pass on what a process writes and keep what it says was wrong."""
    for source, sink, kept in ((process.stderr, sys.stderr, said), (process.stdout, sys.stdout, [])):
        if source is not None:
            thread = Thread(target=_pass_on, args=(source, sink, kept), daemon=True)
            thread.start()
            yield thread


def _variables(*, shown: bool) -> dict[str, str]:
    """Return the environment of the run: this process's, and in a notebook no cursor movements."""
    return {name: value for name, value in os.environ.items() if shown or name not in TERMINAL}


def _pass_on(source: IO[bytes], sink: TextIO, said: list[str]) -> None:
    """Write lines on as they come, and keep those that say what was wrong, for an exception."""
    with TextIOWrapper(source, errors="replace") as lines:
        for line in lines:
            if (reason := told(line)) is not None:
                said.append(reason)
            sink.write(line)
            sink.flush()


def _fail(folder: Path, code: int, said: list[str]) -> NoReturn:
    """Raise what an exit code means."""
    if code == WRONG_REQUEST:
        raise ValueError("; ".join(said))
    if code == INTERRUPTED:
        raise KeyboardInterrupt("; ".join(said))
    summary = {} if code < 0 else readable_summary(folder)  # a killed process has recorded nothing
    if summary.get("status") in ("failed", "oom", "interrupted"):
        raise RunError(folder, summary["status"], str(summary["error"]))
    if ended := END.fullmatch(said[0] if said else ""):  # the summary could not be written: the disk was full, say
        raise RunError(folder, ended[1], "; ".join([ended[2], *said[1:]]))
    how = f"signal {-code} ended its process" if code < 0 else f"its process ended with exit code {code}"
    raise RunError(folder, "failed", "; ".join(said) or how)
