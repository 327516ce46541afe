"""What the ranks of the test of figures on paper do: step as `benchmarks.ranks` does, and count it."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from benchmarks import flops
from benchmarks.collectives import CollectiveCounter
from benchmarks.ranks import RankRequest, real_step
from benchmarks.variants import Workload


def count_all(requests: list[RankRequest]) -> list[tuple[int, float]]:
    """Return operations and bytes received of this rank's second step of every request."""
    dist.init_process_group("gloo")
    found = []
    for request in requests:
        workload = Workload(request.model, request.batch, request.tokens, getattr(torch, request.dtype))
        with contextlib.ExitStack() as stack:
            step, _, _ = real_step(request, workload, stack)
            step()
            with CollectiveCounter() as counter:
                operations = flops.count_flops(step)
        found.append((operations, counter.seen.received_bytes))
    dist.barrier()
    dist.destroy_process_group()
    return found
