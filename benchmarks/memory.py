"""Peak memory of one variant's training step in a process of its own: `python -m benchmarks.memory --variant w4a4`."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks.peers import MissingPeerError
from benchmarks.variants import VARIANTS, Workload, load_network, make_step
from rotexp.metrics.memory import GIB, peaks, reset_peaks

TIMEOUT_SECONDS = 1800
STEPS = 2


def measure(variant: str, workload: Workload, *, steps: int = STEPS) -> dict[str, float]:
    """Run some steps of a variant and return, in GiB, the process' peaks over them and `weights_gib`.

    The model is loaded before; what loading took is not in the peaks.

    Raises:
        MissingPeerError: the variant needs a package that is not installed.
    """
    network = load_network(workload)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    step = make_step(variant, network, workload.token_ids(network.get_input_embeddings().num_embeddings))  # type: ignore[operator]
    gc.collect()
    reset_peaks(workload.device)
    for _ in range(steps):
        step()
    return {"weights_gib": weights / GIB, **peaks(workload.device)}


def measure_apart(variant: str, workload: Workload, *, threads: int | None = None) -> dict[str, float]:
    """Return what `measure` does, from a fresh process.

    Raises:
        MissingPeerError: the variant needs a package that is not installed.
        subprocess.CalledProcessError: the process failed.
    """
    command = [sys.executable, "-m", "benchmarks.memory", "--variant", variant, "--model", workload.model]
    command += ["--batch", str(workload.batch), "--tokens", str(workload.tokens)]
    command += ["--threads", str(threads)] if threads else []
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS)
    found: dict[str, float | str] = json.loads(finished.stdout.splitlines()[-1])
    if "missing" in found:
        raise MissingPeerError(str(found["missing"]))
    return {name: float(value) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one variant and print its figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--model", default="135m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        figures: dict[str, object] = dict(
            measure(options.variant, Workload(options.model, options.batch, options.tokens))
        )
    except MissingPeerError as error:
        figures = {"missing": str(error)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
