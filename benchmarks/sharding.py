"""Four ranks that share the parameters against one rank, at the same global batch: `python -m benchmarks.sharding`."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.ranks import RankRequest, run_world
from benchmarks.timing import Spread, interleave, paired_ratios
from benchmarks.variants import LIMIT, QUANTIZERS, WHOLE

ALONE = "no_shard"


def measure(request: RankRequest, *, world_size: int, repetitions: int) -> dict[str, Any]:
    """Run one rank and `world_size` of them in turn, and explain what the latter cost more.

    Args:
        request: of the sharded world; the one rank does the same batch, unsharded.
    """
    cores = os.cpu_count() or 1
    alone = dataclasses.replace(request, strategy=ALONE, threads=cores)
    shared = dataclasses.replace(request, threads=max(1, cores // world_size))
    found: dict[str, list[dict[str, Any]]] = {"alone": [], "shared": []}

    def run(name: str, wanted: RankRequest, ranks: int) -> None:
        with tempfile.TemporaryDirectory() as place:
            found[name].append(run_world(wanted, Path(place) / "rank.json", world_size=ranks))

    runs = {"alone": partial(run, "alone", alone, 1), "shared": partial(run, "shared", shared, world_size)}
    interleave(runs, repetitions=repetitions, warmup=0)
    return {"variant": request.variant, "world_size": world_size, **explain(found["alone"], found["shared"])}


def explain(alone: Sequence[dict[str, Any]], shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the runs of one rank and of several, and split the extra seconds into what is known of them.

    Returns:
        `wire_s`, the bytes moved at the measured speed; `replicated_s`, operations that every rank repeats, at the
        speed of the one rank; `explained`, their sum over the extra seconds of a step.
    """
    one, many = ([statistics.median(run["modes"]["off"]["seconds"]) for run in runs] for runs in (alone, shared))
    last, ranks = shared[-1], shared[-1]["world_size"]
    extra = statistics.median(many) - statistics.median(one)
    replicated = (ranks * last["flops"] - alone[-1]["flops"]) / alone[-1]["flops"] * statistics.median(one)
    wire = statistics.median(run["wire_s"] for run in shared)
    return {
        "alone_s": statistics.median(one),
        "shared_s": statistics.median(many),
        "ratio": dataclasses.asdict(paired_ratios(many, one)),
        "extra_s": extra,
        "wire_s": wire,
        "replicated_s": replicated,
        "explained": (wire + replicated) / extra if extra > 0 else None,
        "peak_rss_gib": {
            side: found["modes"]["off"]["peak_rss_gib"] for side, found in (("alone", alone[-1]), ("shared", last))
        },
        **{name: last[name] for name in ("collectives", "bytes", "received_bytes", "flops")},
    }


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures for people."""
    columns = ["variant", "ranks", "1 rank (s)", "shared (s)", "ratio (quartiles)", "extra (s)", "collectives"]
    columns += ["received (MiB a rank)", "wire (s)", "repeated work (s)", "explained"]
    return facts.make_table("One step at the same global batch", columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    collectives = ", ".join(f"{count} {name.strip('_')}" for name, count in row["collectives"].items())
    seconds = [f"{row[name]:.3f}" for name in ("alone_s", "shared_s")]
    explained = "–" if row["explained"] is None else f"{100 * row['explained']:.0f} %"
    return [
        row["variant"],
        str(row["world_size"]),
        *seconds,
        Spread(**row["ratio"]).text(),
        f"{row['extra_s']:.3f}",
        collectives,
        f"{row['received_bytes'] / 2**20:.1f}",
        f"{row['wire_s']:.3f}",
        f"{row['replicated_s']:.3f}",
        explained,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant, and write the figures."""
    parser = facts.parser(__doc__, output="sharding.json", repetitions=3)
    parser.add_argument("--model", default="135m")
    variants = [LIMIT, *QUANTIZERS, WHOLE]
    parser.add_argument("--variants", nargs="+", default=variants, choices=variants)
    parser.add_argument("--strategy", default="full", help="full, zero2, hybrid or hybrid_zero2")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="blocks of all ranks together")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a block")
    parser.add_argument("--steps", type=int, default=3, help="steps of one run; their median is one sample")
    options = parser.parse_args(arguments)
    rows = []
    for variant in options.variants:
        shape = {"batch": options.batch, "tokens": options.tokens, "steps": options.steps}
        request = RankRequest(variant, options.model, strategy=options.strategy, **shape)
        rows.append(measure(request, world_size=options.ranks, repetitions=options.repetitions))
    facts.report(options.output, [table(rows)], {"sharding": rows})


if __name__ == "__main__":
    main()
