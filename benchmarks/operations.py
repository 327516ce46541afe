"""Where a training step's processor time goes, operation by operation: `python -m benchmarks.operations`.

On one thread, whose own clock is read around each operation that torch's dispatcher sees, forward and backward: unlike
a profiler's seconds, this does not count what other processes took of the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import facts
from benchmarks.collectives import short_name
from benchmarks.timing import interleave
from benchmarks.variants import LIMIT, QUANTIZERS, VARIANTS, Workload, load_network, make_steps

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_int_mm")
"""Operations that are told apart by the sizes of what they multiply."""

SHOWN = 0.02
"""The share of any variant's step from which an operation has a row of its own."""

OUTSIDE = "outside of operations: Python and autograd"

Seconds = dict[str, float]
"""Of one step, by operation."""


class OperationTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the processor seconds of this thread by operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: Seconds = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let an operation run, and add its time to its kind's."""
        name = kind(func, args)
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began
        return result


def kind(func: Any, args: Any) -> str:
    """Return the name that operations of one kind share; products carry the sizes of their operands."""
    name = short_name(func)
    if name not in PRODUCTS:
        return name
    sizes = ("×".join(map(str, leaf.shape)) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    return f"{name} {' · '.join(sizes)}"


def time_operations(step: Callable[[], object]) -> Seconds:
    """Make one step and return its seconds by operation, and `OUTSIDE` of them."""
    began = time.thread_time()
    with OperationTimer() as timer:
        step()
    return {**timer.seconds, OUTSIDE: time.thread_time() - began - sum(timer.seconds.values())}


def measure(workload: Workload, variants: Sequence[str], *, repetitions: int) -> dict[str, Seconds]:
    """Return the medians of every variant's operations over steps that were made in turn, the first not kept."""
    network = load_network(workload)
    token_ids = workload.token_ids(network.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    steps, _ = make_steps(list(variants), network, token_ids)
    found: dict[str, list[Seconds]] = {name: [] for name in steps}

    def keep(name: str) -> None:
        found[name].append(time_operations(steps[name]))

    interleave({name: partial(keep, name) for name in steps}, repetitions=repetitions, warmup=1)
    return {name: _medians(made[1:]) for name, made in found.items()}


def _medians(steps: Sequence[Seconds]) -> Seconds:
    kinds = {operation for step in steps for operation in step}
    return {operation: statistics.median(step.get(operation, 0.0) for step in steps) for operation in kinds}


def table(name: str, found: dict[str, Seconds]) -> facts.Table:
    """Return seconds and shares of every variant's step for people, the largest first, small ones together."""
    totals = {variant: sum(seconds.values()) for variant, seconds in found.items()}
    kinds = {operation for seconds in found.values() for operation in seconds}

    def share(operation: str) -> float:
        return max(seconds.get(operation, 0.0) / totals[variant] for variant, seconds in found.items())

    large = sorted((operation for operation in kinds if share(operation) >= SHOWN), key=share, reverse=True)
    rows = [[operation, *(_cell(found[v].get(operation, 0.0), totals[v]) for v in found)] for operation in large]
    rest = {v: totals[v] - sum(found[v].get(operation, 0.0) for operation in large) for v in found}
    rows += [["all others", *(_cell(rest[v], totals[v]) for v in found)]]
    rows += [["the step", *(_cell(totals[v], totals[v]) for v in found)]]
    title = f"Processor seconds of a step of {name} on one thread, by operation (% of the step)"
    return facts.make_table(title, ("operation", *found), rows)


def _cell(seconds: float, total: float) -> str:
    return f"{seconds:.3f} ({100 * seconds / total:.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = facts.parser(__doc__, output="operations.json", repetitions=2)
    parser.add_argument("--model", default="135m", help="a random Llama (nano, 135m, 360m, 1b), or gguf")
    parser.add_argument("--batch", type=int, default=1, help="blocks of a step")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a block")
    parser.add_argument("--variants", nargs="+", default=[LIMIT, *QUANTIZERS], choices=VARIANTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads or 1)
    workload = Workload(options.model, options.batch, options.tokens)
    found = measure(workload, options.variants, repetitions=options.repetitions)
    facts.report(options.output, [table(workload.name, found)], {"operations": found})


if __name__ == "__main__":
    main()
