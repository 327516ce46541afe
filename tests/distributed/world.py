"""Run a function on several gloo ranks of this machine, and collect what each returned.

A rank is a process of its own. Most of what a short world costs are imports, so ranks are forked from processes that
have imported what they need and done nothing else: one a place in the world, with a hash seed and threads of its own.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 240
IMPORTED = (
    "rotexp.launch.command_line",
    "rotexp.experiment.experiment",
    "rotexp.launch.rank",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "datasets",  # which Accelerate's data loader looks for
)
PATH = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


def run_world(function: Callable[..., Any], *arguments: Any, world_size: int, folder: Path) -> list[Any]:
    """Call `function(*arguments)` on every rank, its environment as torchrun would set it; return the results by rank.

    The function is found by its module and name, so it must be a top-level one. Rank r has 1 + r % 2 threads.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    until = time.monotonic() + TIMEOUT_SECONDS
    places = [PLACES.get(rank) or PLACES.setdefault(rank, Place(rank)) for rank in range(world_size)]
    try:
        for rank, place in enumerate(places):
            variables = os.environ | _variables(rank, world_size, port)
            place.start((function.__module__, function.__name__, arguments, folder, variables))
        codes = [place.wait(until - time.monotonic()) for place in places]
    finally:
        if any(place.busy for place in places):
            for rank in range(world_size):
                PLACES.pop(rank).kill()
    outputs = [_output(folder, rank).read_text()[-3000:] for rank in range(world_size)]
    ends = [f"rank {rank} ended with {codes[rank]}: {text}" for rank, text in enumerate(outputs)]
    assert codes == [0] * world_size, "\n".join(ends)
    return [pickle.loads((folder / f"result-{rank}.pickle").read_bytes()) for rank in range(world_size)]


class Place:
    """The process from which the ranks of one place in the world are forked, one after another.

    Attributes:
        busy: a rank was started whose end is not known.
    """

    def __init__(self, rank: int) -> None:
        self.busy = False
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {"OMP_NUM_THREADS": str(1 + rank % 2), "PYTHONPATH": os.pathsep.join(PATH)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, request: tuple[Any, ...]) -> None:
        """Fork a rank."""
        self.busy = True
        assert self._process.stdin is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()

    def wait(self, seconds: float) -> int:
        """Return the rank's exit code, negative if a signal ended it."""
        answer = self._process.stdout
        assert answer is not None
        if not select.select([answer], [], [], max(seconds, 0.0))[0]:
            raise TimeoutError(f"a rank has not ended in {TIMEOUT_SECONDS} s")
        code = int(answer.readline())
        self.busy = False
        return code

    def kill(self) -> None:
        """End the process and the rank that it may have."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


PLACES: dict[int, Place] = {}
"""Those that there are, by rank."""


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}.txt"


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(1 + rank % 2),
    }


def _fork_ranks() -> None:
    """Import what ranks need; then fork one for every request, until there are no more."""
    import gc
    import importlib

    for module in IMPORTED:
        with suppress(ImportError):  # of an extra that is not installed, or of what the rank is to fail by
            importlib.import_module(module)
    gc.freeze()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            _be_rank(*request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _be_rank(module: str, name: str, arguments: tuple[Any, ...], folder: Path, variables: dict[str, str]) -> None:
    import importlib
    import traceback

    import numpy as np
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(_output(folder, int(variables["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    np.random.seed()  # as a process of its own would begin
    code = 1
    try:
        result = getattr(importlib.import_module(module), name)(*arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        (folder / f"result-{variables['RANK']}.pickle").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # A finalizing interpreter ends the group's threads in the middle of C++, which aborts (Python < 3.14).
    os._exit(code)


if __name__ == "__main__":
    _fork_ranks()
