"""A run on several nodes, here two on one machine: the same command on each, or torchrun; one folder, one result."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from run_train import left_behind
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

START_SECONDS = 200
GONE_SECONDS = 30
TRAIN = (sys.executable, "-m", "rotexp.train")

STORE_LEFT = re.compile(r"^\[W[^\n]* TCPStore\.cpp:.*?\n\n", re.MULTILINE | re.DOTALL)

Nodes = Callable[..., list[subprocess.Popen[str]]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def nodes(small: list[str], tmp_path: Path) -> Iterator[Nodes]:
    """Start the small job as commands that differ in their run folder, node0 and node1."""
    mark = uuid.uuid4().hex
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, command: tuple[str, ...] = TRAIN, number: int = 2, slurm: bool = False
    ) -> list[subprocess.Popen[str]]:
        given = {argument.partition("=")[0] for argument in arguments}
        kept = [override for override in small if override.partition("=")[0] not in given]
        for node in range(number):
            variables = slurm_task(node) if slurm else {}
            where = f"hydra.run.dir={tmp_path / f'node{node}'}"
            started.append(
                subprocess.Popen(
                    [*command, *kept, "tracker=jsonl", "sharding=full", *arguments, where],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"ROTEXP_TEST": mark} | variables,
                )
            )
        return started[-number:]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    assert left_behind(mark) == []


def slurm_task(node: int) -> dict[str, str]:
    """Return what SLURM tells the one task of a node, here both on this machine."""
    place = {"PROCID": node, "LOCALID": 0, "NTASKS": 2, "NNODES": 1, "STEP_ID": 0, "JOB_ID": os.getpid()}
    return {f"SLURM_{name}": str(value) for name, value in place.items()}


def meeting() -> list[str]:
    """Return what two nodes of one rank each need to meet."""
    place = f"launch.rdzv_endpoint=localhost:{free_port()}"
    return ["launch=elastic", "launch.nnodes=2", "launch.nproc=1", place, f"launch.rdzv_id={uuid.uuid4().hex}"]


def folder_of_rank_0(tmp_path: Path) -> Path:
    """Return the one folder that the nodes left."""
    folders = [folder for folder in tmp_path.glob("node*") if folder.is_dir()]
    assert len(folders) == 1, "every rank writes into the folder of rank 0"
    return folders[0]


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def ended(processes: list[subprocess.Popen[str]], *, seconds: float = START_SECONDS) -> list[tuple[int, str]]:
    """Wait for every process; return exit codes and errors, but for torch's own warning of a store that left first.

    Of two nodes that say at once that they are done, the one that keeps the store may be gone before it is told.
    """
    errors = [STORE_LEFT.sub("", process.communicate(timeout=seconds)[1]) for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def test_two_nodes_train_as_one_does_bit_for_bit(nodes: Nodes, tmp_path: Path) -> None:
    """With as many threads a rank; left to itself, a rank that is alone on its node takes all of that node's cores."""
    assert ended(nodes(*meeting())) == [(0, ""), (0, "")]
    folder = folder_of_rank_0(tmp_path)
    summary = summary_of(folder)
    assert (summary["status"], summary["world_size"], summary["replica"]["max_abs_diff"]) == ("done", 2, 0)
    assert summary["sharding"]["effective"]["sharded"] > 0
    assert {path.name for path in folder.glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}
    folder.rename(tmp_path / "two")
    assert ended(nodes("launch=elastic", "launch.nproc=2", number=1)) == [(0, "")]
    two, one = (load_file(path / "rotations.safetensors") for path in (tmp_path / "two", tmp_path / "node0"))
    assert len(one) == 3
    assert one.keys() == two.keys()
    assert all(torch.equal(matrix, two[name]) for name, matrix in one.items())
    assert summary_of(tmp_path / "node0")["evaluation"] == summary["evaluation"]


def test_slurms_tasks_one_a_node_start_their_own_ranks_and_meet(nodes: Nodes, tmp_path: Path) -> None:
    launch = ("launch=elastic", "launch.nnodes=2", "launch.nproc=1", "launch.rdzv_endpoint=slurm")
    assert ended(nodes(*launch, slurm=True)) == [(0, ""), (0, "")]
    assert summary_of(folder_of_rank_0(tmp_path))["world_size"] == 2


def test_torchruns_ranks_on_two_nodes_share_a_folder(nodes: Nodes, tmp_path: Path) -> None:
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", f"--rdzv-id={uuid.uuid4().hex}")
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *place)
    codes = ended(nodes(command=(sys.executable, *torchrun, "-m", "rotexp.train")))
    assert [code for code, _ in codes] == [0, 0], codes
    summary = summary_of(folder_of_rank_0(tmp_path))
    assert (summary["status"], summary["world_size"]) == ("done", 2)


def training(nodes: Nodes, tmp_path: Path, *options: str) -> tuple[list[subprocess.Popen[str]], Path]:
    """Start two nodes that do not end by themselves; return them, and their folder, once they train."""
    processes = nodes("train.steps=100000", *meeting(), *options)
    deadline = time.monotonic() + START_SECONDS
    while not (trained := [file for file in tmp_path.glob("node*/metrics.jsonl") if "train/loss" in file.read_text()]):
        assert [process.poll() for process in processes] == [None, None], ended(processes)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return processes, trained[0].parent


def test_a_node_that_meets_no_other_gives_up_in_one_line(nodes: Nodes, tmp_path: Path) -> None:
    code, errors = ended(nodes(*meeting(), "launch.timeout_minutes=0.05", number=1))[0]
    assert (code, errors.count("\n")) == (1, 1), errors
    assert "launch.rdzv_endpoint=localhost:" in errors
    assert "the nodes did not meet there" in errors
    assert list(tmp_path.glob("node*")) == []


def test_a_killed_rank_ends_both_nodes(nodes: Nodes, tmp_path: Path) -> None:
    processes, folder = training(nodes, tmp_path)
    children = psutil.Process(processes[1].pid).children(recursive=True)
    ranks = [child for child in children if any("spawn_main" in part for part in child.cmdline())]
    assert len(ranks) == 1
    ranks[0].kill()
    codes = ended(processes, seconds=GONE_SECONDS)
    assert [code for code, _ in codes] == [1, 1]
    assert "SIGKILL" in codes[1][1]
    assert folder_of_rank_0(tmp_path) == folder
    assert summary_of(folder)["status"] == "failed", "whichever rank was killed"


def test_a_signal_to_one_node_ends_both(nodes: Nodes, tmp_path: Path) -> None:
    processes, folder = training(nodes, tmp_path)
    processes[0].send_signal(signal.SIGTERM)
    assert [code for code, _ in ended(processes, seconds=2 * GONE_SECONDS)] == [143, 143]
    assert summary_of(folder)["status"] == "interrupted"
    assert list(folder.glob("checkpoints/step-*")), "what was trained is saved"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_on_one_node_does_not_keep_nodes_alive(stopped: int, nodes: Nodes, tmp_path: Path) -> None:
    processes, folder = training(nodes, tmp_path, "launch.grace_seconds=3")
    place = int(folder.name.removeprefix("node"))  # the node of rank 0
    children = psutil.Process(processes[place ^ stopped].pid).children(recursive=True)
    (rank,) = [child for child in children if any("spawn_main" in part for part in child.cmdline())]
    rank.suspend()
    for process in processes:
        process.send_signal(signal.SIGTERM)
    found = ended(processes, seconds=2 * GONE_SECONDS)
    assert [code for code, _ in found] == [143, 143], found
    # torch's store may warn of a peer that is gone, in lines of its own
    assert [errors.count("rotexp: ") for _, errors in found][place] == 1, found
    assert not any("Traceback" in errors for _, errors in found), found
    assert found[1 - place][1].count("rotexp: ") <= 1, "rank 0's node says it; the other, if its rank was killed"
    summary = summary_of(folder)
    assert (summary["status"], "interrupted by SIGTERM; " in summary["error"]) == ("interrupted", True)
    if stopped == 0:  # else it may miss rank 1, killed a little before it, and say so
        assert "launch.grace_seconds=3 ran out" in summary["error"]
