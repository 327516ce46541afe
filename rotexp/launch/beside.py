"""Start the main command beside this process, with a configuration that is already resolved, and end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from rotexp.config.composition import resolved_yaml
from rotexp.config.schema import Config

ENTRY = (
    "from signal import SIGTERM; from rotexp.process.signals import end_with_parent; end_with_parent(SIGTERM); "
    "from rotexp.train import main; main()"
)
"""What the process does: as the command, but it saves and ends when this process has died. It asks for that itself,
since a process that has threads must run nothing of its own between fork and exec."""


def start(
    config: Config,
    folder: Path,
    configs: Path,
    *,
    name: str,
    variables: Mapping[str, str],
    stdout: int | IO[bytes] | None,
) -> subprocess.Popen[bytes]:
    """Start a run; a terminal's Ctrl-C comes to this process alone, which is to pass it on.

    Args:
        folder: of the run.
        configs: a folder for the file of its configuration, which is called `name`.
        variables: its environment, to which this process's module path is added.
        stdout: where its output goes (None: to this process's).

    Returns:
        The process, whose standard error is a pipe.
    """
    (configs / f"{name}.yaml").write_text(runnable(config, folder), encoding="utf-8")
    granted = [f"plugins=[{','.join(config.plugins)}]"] if config.plugins else []  # typed, since no file grants
    sys.stdout.flush()
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-c", ENTRY),  # -P: the working folder counts where it does in this process
            *("--config-dir", str(configs), "--config-name", f"{name}.yaml", *granted),
        ],
        env={**variables, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and every process of it that is left, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def runnable(config: Config, folder: Path) -> str:
    """Return the YAML from which the main command runs in a folder."""
    escaped = json.dumps(str(folder.resolve())).replace("${", "\\\\${")
    return f"{resolved_yaml(config)}hydra:\n  run:\n    dir: {escaped}\n"
