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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, NoReturn, TextIO

from rotexp.config.composition import to_config
from rotexp.config.schema import Config
from rotexp.face.configs import checked, composed
from rotexp.face.result import RunResult
from rotexp.process.exit_codes import DONE, INTERRUPTED, WRONG_REQUEST
from rotexp.process.outer import adopt
from rotexp.runfolder.records import readable_summary
from rotexp.sweep.child import runnable

ENTRY = (
    "from signal import SIGTERM; from rotexp.process.signals import end_with_parent; end_with_parent(SIGTERM); "
    "from rotexp.train import main; main()"
)
"""What the process of a run does: as the command, but it saves and ends when this process has died."""

TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables by which Jupyter's kernels, among others, say that what they show is as good as a terminal."""

SAID = "rotexp: "
"""How the command begins the line that says what was wrong."""


class RunError(RuntimeError):
    """A run failed, or was ended by somebody else.

    Attributes:
        folder: what the run left, its last checkpoint and logs among it.
        status: failed, oom or interrupted.
        phase: in which phase (None: in none, or its process was killed).
        reason: in one line.
    """

    def __init__(self, folder: Path, status: str, reason: str) -> None:
        super().__init__(f"the run {status}: {reason} (see {folder}/rank-*.log)")
        self.folder, self.status, self.reason = folder, status, reason
        found = re.search(r"\bphase (\w+):", reason)
        self.phase = None if found is None else found[1]


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
        (Path(configs) / "run.yaml").write_text(runnable(config, chosen), encoding="utf-8")
        granted = [f"plugins=[{','.join(config.plugins)}]"] if config.plugins else []  # typed, since no file grants
        code, said = _carry_out(["--config-dir", configs, "--config-name", "run.yaml", *granted])
    return RunResult(chosen) if code == DONE else _fail(chosen, code, said)


def _resolved(request: Config | Sequence[str], folder: str | Path | None) -> tuple[Config, Path]:
    """Return the configuration and the folder that a request means."""
    overrides = () if isinstance(request, Config) else request
    with composed(overrides) as composition:
        given = [line for line in overrides if line.startswith("hydra.run.dir=")]
        if folder is not None and given:
            raise ValueError(f"{given[0]}: the folder is given twice, also as folder={folder}; keep one")
        config = checked(request) if isinstance(request, Config) else to_config(composition.config)
    return config, Path(composition.folder if folder is None else folder).absolute()


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


def _carry_out(arguments: list[str]) -> tuple[int, str]:
    """Run the command to its end; return its exit code, and what it said was wrong."""
    shown = sys.stdout is sys.__stdout__  # in a terminal, with progress bars
    sys.stdout.flush()
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, *arguments],
        env=_variables(shown=shown),
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C comes to this process, which passes it on once
    )
    said: list[str] = []
    passing = [Thread(target=_pass_on, args=(process.stderr, sys.stderr, said), daemon=True)]
    if process.stdout is not None:
        passing.append(Thread(target=_pass_on, args=(process.stdout, sys.stdout, []), daemon=True))
    for thread in passing:
        thread.start()
    try:
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()  # a second one ends all at once
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for thread in passing:
            thread.join()
    if process.returncode == DONE:
        sys.stderr.writelines(f"{SAID}{line}\n" for line in said)
    return process.returncode, said[-1] if said else ""


def _variables(*, shown: bool) -> dict[str, str]:
    """Return the environment of the run: this process's, its module path, and in a notebook no cursor movements."""
    here = {name: value for name, value in os.environ.items() if shown or name not in TERMINAL}
    return here | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _pass_on(source: IO[str], sink: TextIO, said: list[str]) -> None:
    """Write lines on as they come; keep those that say what was wrong, which become an exception's."""
    with source:
        for line in source:
            if line.startswith(SAID):
                said.append(line.removeprefix(SAID).strip())
            else:
                sink.write(line)
                sink.flush()


def _fail(folder: Path, code: int, said: str) -> NoReturn:
    """Raise what an exit code means."""
    if code == WRONG_REQUEST:
        raise ValueError(said)
    if code == INTERRUPTED:
        raise KeyboardInterrupt(said)
    summary = {} if code < 0 else readable_summary(folder)  # a killed process has recorded nothing
    if summary.get("status") in ("failed", "oom", "interrupted"):
        raise RunError(folder, summary["status"], str(summary["error"]))
    ended = f"signal {-code} ended its process" if code < 0 else f"its process ended with exit code {code}"
    raise RunError(folder, "failed", said or ended)
