"""What ranks save that rotate own rows of quantized weights, by closed forms: `python -m benchmarks.own_rows`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import facts
from benchmarks.variants import QUANTIZERS, RANDOM_SIZES, llama_shape, random_network
from rotexp.models.arch import find_spec
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.own_rows.cost import ShardedShape
from rotexp.rotation.own_rows.division import ShardedOver, sharded_shape
from rotexp.rotation.placement import place
from rotexp.sharding.options import ShardingConfig

WORLDS = (("full", 4, 1), ("zero2", 4, 1), ("hybrid", 2, 2), ("full", 64, 1))
"""A strategy, the ranks that share a weight, and the replicas of each share."""

FLOAT32_BYTES = 4
DEVICES = {"cpu": "divided on CPU", "cuda": "on accelerators"}


def rotated_linears(model: str) -> dict[str, RotatedLinear]:
    """Return the linears of a random Llama with R1 and R2, w4a4, by name, without memory for their weights."""
    network = random_network(llama_shape(model), dtype=torch.float32, device=torch.device("meta"))
    place(network, find_spec(network), RotationConfig("learned", r1=True, r2=True), QUANTIZERS["w4a4"], seed=0)
    return dict(_linears(network))


def _linears(network: nn.Module) -> Iterator[tuple[str, RotatedLinear]]:
    yield from ((name, module) for name, module in network.named_modules() if isinstance(module, RotatedLinear))


def count(linears: dict[str, RotatedLinear], strategy: str, ranks: int, replicas: int) -> dict[str, Any]:
    """Return a rank's multiply-adds and received bytes in a step, either way, and which weights are divided.

    Only weights that the ranks can share evenly are counted.
    """
    found: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "replicas": replicas}
    for device in DEVICES:
        where = ShardedOver(ranks, replicas, FLOAT32_BYTES, device)
        shapes = {name: sharded_shape(linear, ShardingConfig(strategy), where) for name, linear in linears.items()}
        fair = {name: shape for name, shape in shapes.items() if shape is not None}
        found |= {"whole": _sums(fair, "whole"), "divided": _sums(fair, "divided")}
        found[device] = _kinds({name for name, shape in fair.items() if shape.is_cheaper_divided}, fair)
    return found


def _sums(shapes: dict[str, ShardedShape], way: str) -> dict[str, float]:
    works = [dataclasses.asdict(getattr(shape, way)()) for shape in shapes.values()]
    return {name: sum(work[name] for work in works) for name in ("multiply_adds", "received_bytes")}


def _kinds(divided: set[str], among: dict[str, ShardedShape]) -> str:
    """Return the last parts of the names of divided weights, in their order, or that it is all or none of them."""
    if not divided or len(divided) == len(among):
        return "all" if divided else "none"
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in among if name in divided))


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures for people."""
    columns = ["model", "ranks", "sharding"]
    columns += [f"{way}: {unit}" for way in ("whole", "own rows") for unit in ("10⁹ multiply-adds", "MiB")]
    title = "Rotating the weights of all layers in one step of a rank, and what it receives"
    return facts.make_table(title, (*columns, *DEVICES.values()), [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    ranks = f"{row['ranks']} × {row['replicas']}" if row["replicas"] > 1 else str(row["ranks"])
    works = [row[way] for way in ("whole", "divided")]
    sums = [(f"{work['multiply_adds'] / 1e9:.4g}", f"{work['received_bytes'] / 2**20:.0f}") for work in works]
    return [row["model"], ranks, row["strategy"], *(cell for pair in sums for cell in pair), *(row[d] for d in DEVICES)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("own_rows.json"), help="the JSON file")
    parser.add_argument("--models", nargs="+", default=["135m", "1b"], choices=RANDOM_SIZES)
    options = parser.parse_args(arguments)
    rows = []
    for model in options.models:
        linears = rotated_linears(model)
        rows += [{"model": model, **count(linears, *world)} for world in WORLDS]
    facts.report(options.output, [table(rows)], {"own_rows": rows})


if __name__ == "__main__":
    main()
