"""Run a function on several gloo ranks of this machine, and collect what each returned."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 240


def run_world(function: Callable[..., Any], *arguments: Any, world_size: int, folder: Path) -> list[Any]:
    """Call `function(*arguments)` on every rank, its environment as torchrun would set it; return the results by rank.

    The function is found by its module and name, so it must be a top-level one. Rank r has 1 + r % 2 threads.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    request = folder / "request.pickle"
    request.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
    processes = [_start(request, rank, world_size, port) for rank in range(world_size)]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=TIMEOUT_SECONDS)[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * world_size, "\n".join(f"rank {rank}: {text[-3000:]}" for rank, text in enumerate(outputs))
    return [pickle.loads((folder / f"result-{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _start(request: Path, rank: int, world_size: int, port: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(1 + rank % 2),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])]),
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(request)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _serve(request: Path) -> None:
    import importlib

    module, name, arguments = pickle.loads(request.read_bytes())
    import torch.distributed as dist

    result = getattr(importlib.import_module(module), name)(*arguments)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    (request.parent / f"result-{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(result))
    os._exit(0)  # a finalizing interpreter ends the group's threads in the middle of C++, which aborts (Python < 3.14)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
