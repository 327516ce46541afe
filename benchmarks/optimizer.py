"""One optimizer step, beside geoopt's and beside one rotation at a time: `python -m benchmarks.optimizer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import facts, flops, peers
from benchmarks.timing import Spread, interleave, paired_ratios, spread, timed
from rotexp.metrics.memory import GIB, peak_rss_bytes, reset_peaks
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.orthogonal.hadamard import random_orthogonal
from rotexp.orthogonal.linear_systems import LARGEST_BATCHED_ORDER

SETS = {
    "576² + 30 × 64²": ((576, 1), (64, 30)),
    "2048² + 16 × 64²": ((2048, 1), (64, 16)),
    "1024² + 28 × 128²": ((1024, 1), (128, 28)),
    "640² + 18 × 256²": ((640, 1), (256, 18)),
    "16 × 64² + 4 × 512²": ((64, 16), (512, 4)),
    "48² + 2 × 12²": ((48, 1), (12, 2)),
}
"""Order and number of the rotations of SmolLM2-135M, Llama 3.2 1B, Qwen3 0.6B, Gemma 3 270M, Llama 3.2 1B with R1 in
blocks, and the smallest random Llama; the last batch of each is also stepped one by one."""

LARGE_ORDERS = (4096, 8192)
"""Orders of R1 of an 8B and of a 70B Llama: minutes, and several GiB."""

OURS = "CayleySGD"
ONE_BY_ONE = "one by one"
LEARNING_RATE = 0.1
GEOOPT_TARGET = 0.8
BATCH_TARGET = 5.0

Rotations = list[Tensor]
"""Orthogonal matrices (n, n), float32, each with a gradient."""


def draw_rotations(orders: Sequence[tuple[int, int]]) -> Rotations:
    """Draw so many orthogonal matrices of each order, with Gaussian gradients."""
    generator = torch.Generator().manual_seed(0)
    matrices = [random_orthogonal(n, generator=generator) for n, count in orders for _ in range(count)]
    parameters: Rotations = [torch.nn.Parameter(matrix) for matrix in matrices]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


def cayley_steps(rotations: Rotations) -> dict[str, Callable[[], object]]:
    """Return our optimizer's step by each of its solvers, the default one first."""
    solvers = {OURS: "exact", f"{OURS} fixed point": "fixed_point"}
    return {
        name: CayleySGD(_copies(rotations), lr=LEARNING_RATE, solver=solver).step for name, solver in solvers.items()
    }


def one_by_one(rotations: Rotations) -> Callable[[], None]:
    """Return the step of as many optimizers as there are rotations."""
    optimizers = [CayleySGD([copied], lr=LEARNING_RATE) for copied in _copies(rotations)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def _copies(rotations: Rotations) -> Rotations:
    copies: Rotations = [torch.nn.Parameter(rotation.detach().clone()) for rotation in rotations]
    for copied, rotation in zip(copies, rotations, strict=True):
        copied.grad = None if rotation.grad is None else rotation.grad.clone()
    return copies


def measure_threads(threads: int, sets: Sequence[str], *, repetitions: int) -> list[dict[str, Any]]:
    """Time every set with so many CPU threads, and leave torch with as many as it had."""
    rows, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    for name in sets:
        rows += measure_set(name, repetitions=repetitions)
        rows += measure_batch(name, repetitions=repetitions)
    torch.set_num_threads(before)
    return [{"threads": threads} | row for row in rows]


def measure_set(name: str, *, repetitions: int) -> list[dict[str, Any]]:
    """Time the step of a whole set of rotations, ours and geoopt's in turn."""
    rotations = draw_rotations(SETS[name])
    steps = cayley_steps(rotations)
    peer_steps, missing = _peer_steps(rotations)
    steps |= peer_steps
    seconds = interleave(steps, repetitions=repetitions, warmup=2)
    demanded = sum(flops.cayley_flops(order, count=count) for order, count in SETS[name])
    rows = [_figures(name, variant, samples, seconds[OURS], demanded) for variant, samples in seconds.items()]
    return [*rows, *({"set": name, "variant": peer, "missing": reason} for peer, reason in missing.items())]


def _peer_steps(rotations: Rotations) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Return the step of geoopt's optimizers, or why there is none."""
    try:
        geoopt = peers.riemannian_sgds(rotations, learning_rate=LEARNING_RATE)
    except peers.MissingPeerError as error:
        return {}, {"geoopt": str(error)}
    return {peer: optimizer.step for peer, optimizer in geoopt.items()}, {}


def measure_large(threads: int | None) -> list[dict[str, Any]]:
    """Take one step of one rotation of every large order, and weigh it: the peak above what was resident before."""
    torch.set_num_threads(threads or torch.get_num_threads())
    rows = []
    for order in LARGE_ORDERS:
        rotations = draw_rotations([(order, 1)])
        variants = (OURS, *_peer_steps(draw_rotations([(2, 1)]))[0])
        for variant in variants:
            row = {"threads": torch.get_num_threads(), "order": order, "variant": variant}
            rows.append(row | _weigh(_one_step(variant, rotations)))
    return rows


def _one_step(variant: str, rotations: Rotations) -> Callable[[], object]:
    if variant == OURS:
        return CayleySGD(_copies(rotations), lr=LEARNING_RATE).step
    return _peer_steps(rotations)[0][variant]


def _weigh(step: Callable[[], object]) -> dict[str, float]:
    reset_peaks(torch.device("cpu"))
    before = peak_rss_bytes()
    return {"seconds": timed(step), "peak_above_gib": (peak_rss_bytes() - before) / GIB}


def measure_batch(name: str, *, repetitions: int) -> list[dict[str, Any]]:
    """Time the last rotations of a set as one batch, and one by one."""
    order, count = SETS[name][-1]
    rotations = draw_rotations([(order, count)])
    steps: dict[str, Callable[[], object]] = {OURS: CayleySGD(_copies(rotations), lr=LEARNING_RATE).step}
    steps[ONE_BY_ONE] = one_by_one(rotations)
    seconds = interleave(steps, repetitions=repetitions, warmup=2)
    demanded = flops.cayley_flops(order, count=count)
    only = f"{count} × {order}²"
    rows = [_figures(only, variant, samples, seconds[OURS], demanded) for variant, samples in seconds.items()]
    return [{"order": order} | row for row in rows]


def _figures(name: str, variant: str, samples: list[float], ours: list[float], demanded: int) -> dict[str, Any]:
    return {
        "set": name,
        "variant": variant,
        "seconds": dataclasses.asdict(spread(samples)),
        "samples": samples,
        "ours_over_this": dataclasses.asdict(paired_ratios(ours, samples)),
        "this_over_ours": dataclasses.asdict(paired_ratios(samples, ours)),
        "flops_demanded": demanded if variant in (OURS, ONE_BY_ONE) else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures for people."""
    columns = (
        "threads",
        "rotations",
        "variant",
        "step (ms)",
        "ours ÷ this (quartiles)",
        "target",
        "GFLOP demanded",
        "GFLOP/s",
    )
    return facts.make_table("Optimizer step", columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    names = [str(row["threads"]), row["set"], row["variant"]]
    if "missing" in row:
        return [*names, row["missing"], *["–"] * 4]
    seconds, demanded = row["seconds"]["median"], row["flops_demanded"]
    work = [f"{demanded / 1e9:.3g}", f"{demanded / seconds / 1e9:.3g}"] if demanded else ["–", "–"]
    ratio = Spread(**row["ours_over_this"]).text()
    return [*names, f"{1e3 * seconds:.2f}", ratio, _target(row), *work]


def _target(row: dict[str, Any]) -> str:
    if row["variant"] == ONE_BY_ONE and row["order"] <= LARGEST_BATCHED_ORDER:
        return f"≤ {1 / BATCH_TARGET:.2f}"
    return f"≤ {GEOOPT_TARGET}" if row["variant"].startswith("geoopt") else "–"


def large_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return what single steps of large rotations took."""
    columns = (
        "threads",
        "order",
        "variant",
        "first step (s)",
        "peak above before (GiB)",
        "matrix (GiB)",
        "GFLOP/s demanded",
    )
    return facts.make_table("Optimizer step of one large rotation", columns, [_large_cells(row) for row in rows])


def _large_cells(row: dict[str, Any]) -> list[str]:
    order, seconds = row["order"], row["seconds"]
    rate = f"{flops.cayley_flops(order) / seconds / 1e9:.3g}" if row["variant"] == OURS else "–"
    sizes = [f"{row['peak_above_gib']:.2f}", f"{4 * order**2 / GIB:.2f}"]
    return [str(row["threads"]), str(order), row["variant"], f"{seconds:.2f}", *sizes, rate]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every set, and write the figures."""
    parser = facts.parser(__doc__, output="optimizer.json", repetitions=15)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS)[:-1])
    parser.add_argument("--large", action="store_true", help=f"only one step of orders {LARGE_ORDERS}, and its memory")
    options = parser.parse_args(arguments)
    if options.large:
        large = measure_large(options.threads)
        facts.report(options.output, [large_table(large)], {"large": large})
        return
    numbers = [options.threads] if options.threads else sorted({1, 2, torch.get_num_threads()})
    rows = [row for number in numbers for row in measure_threads(number, options.sets, repetitions=options.repetitions)]
    facts.report(options.output, [table(rows)], {"optimizer": rows})


if __name__ == "__main__":
    main()
