"""Under `numerics=exact` commands make the same bits: on two nodes, and killed and continued in another world.

Of every run is compared all that `ranks_exact.made` names. Threads are as the command chooses them: all cores for one
rank that is alone on its node, fewer for others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from run_train import Run, left_behind, run_train
from test_multi_node import TRAIN, ended, folder_of_rank_0, meeting
from test_resume import checkpoints, slow, wait_for_steps

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from ranks_exact import Made, differing, made

pytestmark = pytest.mark.slow

__all__ = ["slow"]

STEPS = 20
KEPT = [f"step-{step:08d}" for step in range(5, STEPS + 1, 5)]


@pytest.fixture(scope="module")
def exact(texts: list[str]) -> list[str]:
    """The overrides of a run of the shipped model, whose checkpoints all stay."""
    return [
        "numerics=exact",
        *texts,
        "data.sequence_length=32",
        "data.global_batch_size=4",
        "evaluation.window=32",
        "evaluation.max_windows=3",
        f"train.steps={STEPS}",
        "train.checkpoint_every=5",
        "train.keep_checkpoints=4",
        "tracker=jsonl",
    ]


@pytest.fixture(scope="module")
def alone(exact: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """What one rank makes of the request under a quantizer."""

    @cache
    def found(quant: str) -> Made:
        run = run_train(tmp_path_factory.mktemp("alone") / "run", *exact, f"quant={quant}")
        assert (run.code, run.errors, run.summary["world_size"]) == (0, "", 1)
        assert checkpoints(run.folder) == KEPT
        assert "a rank takes its 4 blocks one by one" in run.output
        return made(run.folder)

    return found


@pytest.mark.parametrize("quant", ["w4a4", "w4a4kv4", "w16a4"])
def test_two_nodes_make_the_bits_of_one_rank(
    exact: list[str], alone: Callable[[str], Made], quant: str, tmp_path: Path
) -> None:
    command = [*TRAIN, *exact, f"quant={quant}", "sharding=full", *meeting()]
    environment = os.environ | {"ROTEXP_TEST": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [*command, f"hydra.run.dir={tmp_path / f'node{node}'}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for node in range(2)
    ]
    try:
        assert ended(processes) == [(0, ""), (0, "")]
    finally:
        for process in processes:
            process.kill()
    assert left_behind(str(tmp_path)) == []
    folder = folder_of_rank_0(tmp_path)
    assert Run(folder, 0, "", "").summary["world_size"] == 2
    assert differing(made(folder), alone(quant)) == []


def test_a_killed_run_continued_in_another_world_makes_the_bits_of_one_rank(
    exact: list[str], alone: Callable[[str], Made], slow: str, tmp_path: Path
) -> None:
    """It began as two ranks under `full`; the same folder goes on as four under `hybrid`."""
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, slow, *exact, "sharding=full", f"hydra.run.dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"ROTEXP_TEST": str(folder)},
    ) as process:
        try:
            wait_for_steps(process, folder, 7)
        finally:
            process.send_signal(signal.SIGKILL)
    assert left_behind(str(folder), seconds=30) == []
    begun = Run(folder, process.returncode, "", "")
    assert (begun.code, begun.summary["status"]) == (-signal.SIGKILL, "running")
    assert KEPT[0] in checkpoints(folder)
    assert KEPT[-1] not in checkpoints(folder)

    continued = run_train(folder, *exact, "sharding=hybrid")
    assert (continued.code, continued.errors, continued.summary["world_size"]) == (0, "", 4)
    assert f"resume: resumed from {folder / 'checkpoints'}" in continued.output.replace("\n", "")
    assert differing(made(folder), alone("w4a4")) == []
