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
from benchmarks.accounts import DECODING, FEW, OPTIMIZER, PLAIN, PLAIN_FEW, STEP, UNSHARDED, WIRE
from benchmarks.ranks import RankRequest, run_world
from benchmarks.timing import Spread, interleave, paired_ratios
from benchmarks.variants import LIMIT, QUANTIZERS, WHOLE

ALONE = "no_shard"
EXPLAINED = 0.9
"""The share of the extra processor time that the parts must add up to, and by as much they may exceed it."""

PARTS = {
    "plain": "plain model in shares, on shared cores",
    "quantizing": "work on activations, on shared cores",
    "repeated": "repeated work on weights",
    "rotating": "work on weights, on shared cores",
    "decoding": "decoding gathered weights",
    "optimizer": "optimizer",
    "wire": "moving bytes",
    "hooks": "outside of operations",
}
"""The columns of the table."""

Account = dict[str, Any]
"""What `benchmarks.accounts.account` returns, with the medians of its seconds."""


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
    return {
        "variant": request.variant,
        "world_size": world_size,
        **compare(found["alone"], found["shared"]),
        "account": explain(*(_accounts(runs) for runs in found.values())),
    }


def compare(alone: Sequence[dict[str, Any]], shared: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a step of one rank and of several took on the clock, and what the latter counted."""
    one, many = ([statistics.median(run["modes"]["off"]["seconds"]) for run in runs] for runs in (alone, shared))
    last = shared[-1]
    return {
        "alone_s": statistics.median(one),
        "shared_s": statistics.median(many),
        "ratio": dataclasses.asdict(paired_ratios(many, one)),
        "peak_rss_gib": {
            side: found["modes"]["off"]["peak_rss_gib"] for side, found in (("alone", alone[-1]), ("shared", last))
        },
        **{name: last[name] for name in ("collectives", "bytes", "received_bytes", "flops")},
    }


def _accounts(runs: Sequence[dict[str, Any]]) -> Account:
    """Return the medians over all rounds of all runs, in processor seconds, and the counted operations."""
    accounts = [run["account"] for run in runs]
    seconds = {
        part: statistics.median(second for account in accounts for second in account["seconds"][part])
        for part in accounts[0]["seconds"]
    }
    return {**accounts[0], "seconds": seconds}


def explain(alone: Account, shared: Account) -> dict[str, Any]:
    """Split the processor seconds that several ranks take more than one into what was measured of them apart.

    Returns:
        `parts`: what the plain model's products take more in as many processes as there are ranks, at once, each on its
        share of the batch; what rotating and quantizing activations takes more so; operations on weights that ranks
        repeat, at what one rank takes for them; what all ranks' operations on weights take more than they would there;
        decoding what was gathered; the optimizer's steps; the bytes; what is in no operation, such as FSDP2's hooks,
        beyond that of an unsharded step. `explained`, the share of the extra seconds that they add up to.
    """
    one, many = alone["seconds"], shared["seconds"]
    extra = many[STEP] - one[STEP]
    needed = _weights(alone["flops"])
    done = shared["flops"][STEP] - (alone["flops"][UNSHARDED] - needed)  # activations take as many, however shared out
    once, here = (_seconds_per_flop(account) for account in (alone, shared))
    parts = {
        "plain": many[PLAIN] - one[PLAIN],
        "quantizing": _activations(many) - _activations(one),
        "repeated": once * (done - needed),
        "rotating": (here - once) * done,
        "decoding": many[DECODING],
        "optimizer": many.get(OPTIMIZER, 0.0) - one.get(OPTIMIZER, 0.0),
        "wire": many[WIRE],
        "hooks": shared["outside"][STEP] - shared["outside"][UNSHARDED],
    }
    found = {"alone": one, "shared": many, "bytes": shared["bytes"], "waiting": shared["waiting"]}
    return {**found, "extra": extra, "parts": parts, "explained": sum(parts.values()) / extra}


def _weights(steps: dict[str, float]) -> float:
    """Return what is left of steps on two tokens beyond plain ones: rotating and quantizing weights."""
    return steps[FEW] - steps[PLAIN_FEW]


def _rotating_seconds(seconds: dict[str, float]) -> float:
    return _weights(seconds) - seconds.get(OPTIMIZER, 0.0)


def _activations(seconds: dict[str, float]) -> float:
    return seconds[UNSHARDED] - seconds[PLAIN] - seconds.get(OPTIMIZER, 0.0) - _rotating_seconds(seconds)


def _seconds_per_flop(account: Account) -> float:
    """Return what rotating and quantizing weights costs for each of its operations, in an unsharded step."""
    operations = _weights(account["flops"])
    return _rotating_seconds(account["seconds"]) / operations if operations else 0.0


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the counts, and seconds on the clock, for people."""
    columns = ["variant", "ranks", "1 rank (s)", "shared (s)", "ratio (quartiles)", "GFLOP a rank", "collectives"]
    columns += ["received (MiB a rank)", "peak resident (GiB a rank)"]
    return facts.make_table("One step at the same global batch", columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    collectives = ", ".join(f"{count} {name.strip('_')}" for name, count in row["collectives"].items())
    return [
        row["variant"],
        str(row["world_size"]),
        *(f"{row[name]:.3f}" for name in ("alone_s", "shared_s")),
        Spread(**row["ratio"]).text(),
        f"{row['flops'] / 1e9:.1f}",
        collectives,
        f"{row['received_bytes'] / 2**20:.1f}",
        f"{row['peak_rss_gib']['shared']:.2f}",
    ]


def account_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return where the processor time goes, for people."""
    columns = (
        "variant",
        "1 rank",
        "all ranks",
        "extra",
        *PARTS.values(),
        "explained",
        "target",
        "met",
        "a second's waiting",
    )
    return facts.make_table("Processor seconds of all ranks, a step", columns, [_account_cells(row) for row in rows])


def _account_cells(row: dict[str, Any]) -> list[str]:
    account = row["account"]
    seconds = [account["alone"][STEP], account["shared"][STEP], account["extra"]]
    seconds += [account["parts"][part] for part in PARTS]
    met = "yes" if EXPLAINED <= account["explained"] <= 2 - EXPLAINED else "MISSED"
    shares = [
        f"{100 * account['explained']:.0f} %",
        f"{100 * EXPLAINED:.0f} to {100 * (2 - EXPLAINED):.0f} %",
        met,
        f"{account['waiting']:.3f}",
    ]
    return [row["variant"], *(f"{second:.2f}" for second in seconds), *shares]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant, and write the figures."""
    parser = facts.parser(__doc__, output="sharding.json", repetitions=1)
    parser.add_argument("--model", default="135m")
    parser.add_argument("--variants", nargs="+", default=[LIMIT, "w4a4"], choices=[LIMIT, *QUANTIZERS, WHOLE])
    parser.add_argument("--strategy", default="full", help="full, zero2, hybrid or hybrid_zero2")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="blocks of all ranks together")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a block")
    parser.add_argument("--steps", type=int, default=2, help="steps of one run; their median is one sample")
    parser.add_argument("--rounds", type=int, default=3, help="over the parts of a step, in each run")
    options = parser.parse_args(arguments)
    rows = []
    for variant in options.variants:
        shape = {name: getattr(options, name) for name in ("batch", "tokens", "steps", "rounds")}
        request = RankRequest(variant, options.model, strategy=options.strategy, **shape)
        rows.append(measure(request, world_size=options.ranks, repetitions=options.repetitions))
    facts.report(options.output, [table(rows), account_table(rows)], {"sharding": rows})


if __name__ == "__main__":
    main()
