"""A training step over the plain forward and backward of the same frozen model: `python -m benchmarks.step`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import facts, flops, memory
from benchmarks.peers import MissingPeerError
from benchmarks.timing import Spread, interleave, paired_ratios, spread
from benchmarks.variants import (
    LIMIT,
    QUANTIZERS,
    SEARCHING,
    VARIANTS,
    Workload,
    llama_shape,
    load_network,
    make_steps,
)

TARGETS = {
    ("w16a4", 1): 1.22,
    ("w4a4", 1): 1.36,
    ("w16a4", 4): 1.18,
    ("w4a4", 4): 1.25,
}
"""The largest ratio to the limit that a training step may have, by variant and batch (blocks of 1024 tokens)."""

MEMORY_TARGET = 1.15
REFRESH_EVERY = 10
"""Steps between two searches of clip ratios, the default of `quant.refresh_every`."""


def measure(workload: Workload, variants: Sequence[str], *, repetitions: int) -> list[dict[str, Any]]:
    """Time every variant on one workload, in turn, and count its operations.

    Returns:
        A row of figures a variant; `missing` says why one could not be measured.
    """
    network = load_network(workload)
    token_ids = workload.token_ids(network.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    steps, missing = make_steps(list(variants), network, token_ids)
    interleave(steps, repetitions=0, warmup=1)  # Brevitas' first forward, which searches, cannot be counted
    counted = {name: flops.count_operations(step) for name, step in steps.items()}
    seconds = interleave(steps, repetitions=repetitions, warmup=0, synchronize=synchronizer(workload.device))
    rows = [
        {
            **_figures(workload, name, samples, seconds[LIMIT]),
            "flops": counted[name].floating,
            "flops_ratio": counted[name].floating / counted[LIMIT].floating,
            "integer_operations": counted[name].integer,
            "flops_demanded": demanded_flops(network, workload, name),
        }
        for name, samples in seconds.items()
    ]
    absent = [{"workload": workload.name, "variant": name, "missing": reason} for name, reason in missing.items()]
    return [*rows, *_amortized(workload, seconds), *absent]


def synchronizer(device: torch.device) -> Any:
    """Return a function that waits until the device has finished."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def demanded_flops(network: nn.Module, workload: Workload, variant: str) -> int | None:
    """Return what the arithmetic demands of a variant, or None where no closed form is known."""
    config: Any = network.config
    shape = {name: getattr(config, name) for name in llama_shape("nano")}
    demanded = flops.limit_flops(shape, tokens=workload.tokens, batch=workload.batch)
    if variant == LIMIT:
        return demanded
    quantizer = QUANTIZERS.get(variant.split()[0])
    if quantizer is None:
        return None
    tokens, quantized = workload.batch * workload.tokens, quantizer.weights.enabled
    return demanded + flops.rotation_flops(shape, tokens=tokens, quantized_weights=quantized)


def _figures(workload: Workload, name: str, samples: list[float], limit: list[float]) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "model": workload.model,
        "batch": workload.batch,
        "tokens": workload.tokens,
        "variant": name,
        "seconds": dataclasses.asdict(spread(samples)),
        "samples": samples,
        "ratio": dataclasses.asdict(paired_ratios(samples, limit)),
    }


def _amortized(workload: Workload, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return what a step of w4a4 takes on average when every `REFRESH_EVERY`-th searches its clip ratios."""
    if SEARCHING not in seconds or "w4a4" not in seconds:
        return []
    pairs = zip(seconds["w4a4"], seconds[SEARCHING], strict=True)
    samples = [cached + (searching - cached) / REFRESH_EVERY for cached, searching in pairs]
    return [_figures(workload, f"w4a4, search every {REFRESH_EVERY}", samples, seconds[LIMIT])]


def measure_memory(workload: Workload, variants: Sequence[str], *, threads: int | None) -> list[dict[str, Any]]:
    """Return the peak of every variant's process, and its ratio to the limit's."""
    rows: list[dict[str, Any]] = []
    for variant in variants:
        row: dict[str, Any] = {"workload": workload.name, "variant": variant}
        try:
            rows.append(row | memory.measure_apart(variant, workload, threads=threads))
        except MissingPeerError as error:
            rows.append(row | {"missing": str(error)})
    limit = rows[0]["peak_rss_gib"]
    return [row if "missing" in row else row | {"ratio": row["peak_rss_gib"] / limit} for row in rows]


def time_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the times for people."""
    columns = ["workload", "variant", "step (s)", "ratio to limit (quartiles)", "target"]
    columns += ["TFLOP", "÷ limit's", "÷ demanded", "GFLOP/s", "TOP in int8"]
    return facts.make_table("Training step against the limit", columns, [_time_cells(row) for row in rows])


def _time_cells(row: dict[str, Any]) -> list[str]:
    name = [row["workload"], row["variant"]]
    if "missing" in row:
        return [*name, row["missing"], *["–"] * 7]
    ratio, seconds = Spread(**row["ratio"]), row["seconds"]["median"]
    target = TARGETS.get((row["variant"].split(",")[0], row["batch"])) if row["tokens"] == 1024 else None
    cells = [*name, f"{seconds:.3f}", ratio.text(), f"≤ {target}" if target else "–"]
    if "flops" not in row:
        return [*cells, *["–"] * 5]
    demanded = f"{row['flops'] / row['flops_demanded']:.2f}" if row["flops_demanded"] else "–"
    rate = f"{row['flops'] / seconds / 1e9:.0f}"
    integers = f"{row['integer_operations'] / 1e12:.3g}" if row["integer_operations"] else "–"
    return [*cells, f"{row['flops'] / 1e12:.3g}", f"{row['flops_ratio']:.2f}", demanded, rate, integers]


def memory_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the peaks for people."""
    columns = ("workload", "variant", "peak resident (GiB)", "weights (GiB)", "ratio to limit", "target")
    return facts.make_table("Peak memory against the limit", columns, [_memory_cells(row) for row in rows])


def _memory_cells(row: dict[str, Any]) -> list[str]:
    if "missing" in row:
        return [row["workload"], row["variant"], row["missing"], *["–"] * 3]
    target = "–" if row["variant"] == LIMIT else f"≤ {MEMORY_TARGET}"
    sizes = [f"{row['peak_rss_gib']:.2f}", f"{row['weights_gib']:.2f}", f"{row['ratio']:.2f}"]
    return [row["workload"], row["variant"], *sizes, target]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every workload, and write the figures."""
    parser = facts.parser(__doc__, output="step.json", repetitions=5)
    parser.add_argument("--models", nargs="+", default=["135m"], help="random Llamas (nano, 135m, 360m, 1b), or gguf")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="blocks of a step")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024], help="tokens of a block")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--no-memory", action="store_true", help="skip the processes that measure peak memory")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    variants = [LIMIT, *(variant for variant in options.variants if variant != LIMIT)]
    shapes = itertools.product(options.models, options.batches, options.tokens)
    workloads = [Workload(model, batch, tokens) for model, batch, tokens in shapes]
    times, peaks = [], []
    for workload in workloads:
        times += measure(workload, variants, repetitions=options.repetitions)
        if not options.no_memory:
            measured = [variant for variant in variants if variant != SEARCHING]
            peaks += measure_memory(workload, measured, threads=options.threads)
    tables = [time_table(times), *([memory_table(peaks)] if peaks else [])]
    facts.report(options.output, tables, {"step": times, "memory": peaks})


if __name__ == "__main__":
    main()
