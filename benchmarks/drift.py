"""How far runs that differ by rounding alone drift apart: `python -m benchmarks.drift [override …]`.

Whole runs, as `python -m rotexp.train` carries them out, in processes of their own: one as it is, and one for each
seed of `numerics.noise_seed`, which moves every weight of the token embedding to the next number of its dtype.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import facts

DEFAULTS = ("model=tiny",)
TIMEOUT_SECONDS = 3600
ROTATIONS = "rotations.pt"
"""The file in which a run leaves its rotations of every step."""
FIGURES = ("perplexity", "kl")


@dataclass(frozen=True)
class Drifter:
    """One run.

    Attributes:
        losses, grad_norms: of every step.
        rotations: after every step, by name.
        evaluation: figures by row.
    """

    losses: list[float]
    grad_norms: list[float]
    rotations: list[dict[str, Tensor]]
    evaluation: dict[str, dict[str, float]]


@contextmanager
def kept_rotations() -> Iterator[list[dict[str, Tensor]]]:
    """Keep copies of the rotations after every step that is made inside the block."""
    from rotexp.training.state import TrainingState

    kept: list[dict[str, Tensor]] = []
    advance = TrainingState.advance

    def advance_and_keep(state: TrainingState, loss: float) -> None:
        advance(state, loss)
        kept.append(state.model.bank.snapshot())

    with mock.patch.object(TrainingState, "advance", advance_and_keep):
        yield kept


def train(overrides: Sequence[str], folder: Path) -> None:
    """Run in this process, and leave the run's files and the rotations of every step in the folder."""
    import rotexp
    from rotexp.experiment.inputs import open_inputs
    from rotexp.launch.rank import run_rank

    config = rotexp.load_config(["tracker=jsonl", "train.checkpoint_every=null", *overrides, "train.log_every=1"])
    with kept_rotations() as kept:
        run_rank(config, open_inputs(config), folder)
    torch.save(kept, folder / ROTATIONS)


def run(overrides: Sequence[str], folder: Path) -> Drifter:
    """Train in a process of its own, and return what was found.

    Raises:
        RuntimeError: it failed.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.drift", "--run-folder", str(folder), *overrides]
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    ended = subprocess.run(command, check=False, timeout=TIMEOUT_SECONDS, **streams)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(overrides)}: {(ended.stderr.splitlines() or [''])[-1]}")
    return read(folder)


def read(folder: Path) -> Drifter:
    """Return what a run left in its folder."""
    from rotexp.runfolder.records import read_metrics, read_summary, revived

    steps = [row for row in read_metrics(folder) if "train/loss" in row]
    figures = revived(read_summary(folder)["evaluation"])
    return Drifter(
        losses=[row["train/loss"] for row in steps],
        grad_norms=[row["grad_norm/total"] for row in steps],
        rotations=torch.load(folder / ROTATIONS, weights_only=True),
        evaluation={row: found for row, found in figures.items() if "perplexity" in found},
    )


def steps_apart(runs: Sequence[Drifter]) -> list[dict[str, float]]:
    """Return for every step the loss of the first run, and how far the runs are apart there."""
    steps = zip(*(zip(run.losses, run.grad_norms, run.rotations, strict=True) for run in runs), strict=True)
    return [_step_apart(number, *zip(*found, strict=True)) for number, found in enumerate(steps, start=1)]


def _step_apart(
    step: int, losses: Sequence[float], norms: Sequence[float], rotations: Sequence[dict[str, Tensor]]
) -> dict[str, float]:
    stacks = [torch.stack([matrices[name] for matrices in rotations]) for name in rotations[0]]
    return {
        "step": step,
        "loss": losses[0],
        "loss_range": max(losses) - min(losses),
        "grad_norm": norms[0],
        "grad_norm_range": max(norms) - min(norms),
        "rotation_range": max((stack.amax(0) - stack.amin(0)).max().item() for stack in stacks),
    }


def rows_apart(runs: Sequence[Drifter]) -> list[dict[str, Any]]:
    """Return for every held-out row its figures in the first run, and their range and deviation over all runs."""
    return [
        {"row": row, **{figure: _spread([run.evaluation[row][figure] for run in runs]) for figure in FIGURES}}
        for row in runs[0].evaluation
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"value": values[0], "range": max(values) - min(values), "deviation": statistics.stdev(values)}


def steps_table(steps: Sequence[dict[str, float]], *, runs: int) -> facts.Table:
    """Return powers of two among the steps, and the last, for people."""
    columns = ("step", "loss: max − min", "grad norm: max − min", "largest difference of R")
    figures = ("loss_range", "grad_norm_range", "rotation_range")
    shown = [found for found in steps if _is_power_of_two(int(found["step"])) or found is steps[-1]]
    rows = [[f"{found['step']:.0f}", *(f"{found[figure]:.2e}" for figure in figures)] for found in shown]
    return facts.make_table(f"{runs} runs that differ by rounding alone", columns, rows)


def _is_power_of_two(step: int) -> bool:
    return step & (step - 1) == 0


def rows_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the held-out figures for people."""
    columns = ["row", *chain(*((figure, "max − min", "deviation") for figure in ("perplexity", "KL (nats)")))]
    return facts.make_table("Their held-out figures", columns, [_row_cells(found) for found in rows])


def _row_cells(found: dict[str, Any]) -> list[str]:
    spreads = [(found["perplexity"], 2), (found["kl"], 4)]
    texts = [(f"{s['value']:.{digits}f}", f"{s['range']:.2g}", f"{s['deviation']:.2g}") for s, digits in spreads]
    return [found["row"], *chain(*texts)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, compare, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("drift.json"), help="the JSON file")
    parser.add_argument("--seeds", type=int, default=4, help="of noise; each is a run, beside that without noise")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (None: a run's choice)")
    parser.add_argument("--run-folder", type=Path, help="be a run, and leave its files there")
    parser.epilog = f"Further arguments are overrides in place of: {' '.join(DEFAULTS)}"
    options, overrides = parser.parse_known_args(arguments)
    if options.run_folder is not None:
        train(overrides, options.run_folder)
        return
    chosen = [*(overrides or DEFAULTS), f"train.steps={options.steps}"]
    chosen += [f"launch.threads={options.threads}"] if options.threads else []
    seeds = [None, *range(options.seeds)]
    with tempfile.TemporaryDirectory() as place:
        runs = []
        for number, seed in enumerate(seeds):
            noise = "null" if seed is None else str(seed)
            runs.append(run([*chosen, f"numerics.noise_seed={noise}"], Path(place) / str(number)))
    steps, rows = steps_apart(runs), rows_apart(runs)
    tables = [steps_table(steps, runs=len(runs)), rows_table(rows)]
    facts.report(options.output, tables, {"overrides": chosen, "drift": steps, "evaluation": rows})


if __name__ == "__main__":
    main()
