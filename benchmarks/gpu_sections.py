"""The sections of the check on an accelerator, each a process of its own that ends within its time.

A section writes its tables after every row, so that one that is ended too early leaves what it has.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import facts, footprint, quantizers, step
from benchmarks.ranks import RankRequest, run_world
from benchmarks.timing import spread
from benchmarks.variants import LIMIT, QUANTIZERS, SEARCHING, Workload, llama_shape, load_network, make_step
from rotexp.metrics.memory import GIB, peaks, reset_peaks

MODES = ("off", "selective", "universal", "event")


@dataclass(frozen=True)
class Settings:
    """How large everything is, and how long it may take."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    model: str = "1b"
    tokens: int = 1024
    rows: int = 4096
    repetitions: int = 7
    seconds: float = 60.0

    def arguments(self) -> list[str]:
        """Return them as command-line options."""
        return [text for option in fields(self) for text in (f"--{option.name}", str(getattr(self, option.name)))]

    def workload(self, batch: int) -> Workload:
        """Return the workload of so many blocks."""
        return Workload(self.model, batch, self.tokens, getattr(torch, self.dtype), torch.device(self.device))


@dataclass
class Section:
    """What a section has found so far, kept in its file; and the time it has left."""

    output: Path
    settings: Settings
    began: float = field(default_factory=time.monotonic)
    tables: list[facts.Table] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, table: facts.Table, figures: Any) -> None:
        """Write the table and the figures of that name, in place of earlier ones."""
        self.tables = [*(known for known in self.tables if known["title"] != table["title"]), table]
        self.figures[name] = figures
        facts.write_json(self.output, {"tables": self.tables, "figures": self.figures, "machine": facts.machine()})

    @property
    def seconds_left(self) -> float:
        """Time until the section must have ended."""
        return self.settings.seconds - (time.monotonic() - self.began)


def kernels(section: Section) -> None:
    """Measure quantizers and Hadamard transforms against a copy, at the model's widths."""
    settings, shape = section.settings, llama_shape(section.settings.model)
    rows: list[dict[str, Any]] = []
    for width in (shape["hidden_size"], shape["intermediate_size"]):
        if section.seconds_left < 0.2 * settings.seconds:
            return
        rows += quantizers.measure(
            f"{settings.rows} × {width}",
            (settings.rows, width),
            repetitions=settings.repetitions,
            device=torch.device(settings.device),
            dtype=getattr(torch, settings.dtype),
        )
        section.keep("quantizers", quantizers.table(rows), rows)


def steps(section: Section) -> None:
    """Measure step ratios and peak memory, for one block and for four."""
    times: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    variants = [LIMIT, *QUANTIZERS, SEARCHING]
    for batch in (1, 4):
        if section.seconds_left < 0.4 * section.settings.seconds:
            return
        workload = section.settings.workload(batch)
        memory += measure_memory(workload, [LIMIT, *QUANTIZERS])
        section.keep("memory", memory_table(memory), memory)
        times += step.measure(workload, variants, repetitions=section.settings.repetitions)
        section.keep("step", step.time_table(times), times)


def measure_memory(workload: Workload, variants: Sequence[str]) -> list[dict[str, Any]]:
    """Return what each variant's step takes at its peak, and what the closed form says, in GiB.

    Peaks include the weights, which all variants share.
    """
    network = load_network(workload)
    rows: list[dict[str, Any]] = []
    for variant in variants:
        found = peak_of_step(variant, network, workload)
        found["closed_form_gib"] = closed_form(variant, network, workload) / GIB
        limit = rows[0]["peak_gib"] if rows else found["peak_gib"]
        rows.append({"workload": workload.name, "variant": variant, **found, "ratio": found["peak_gib"] / limit})
    return rows


def peak_of_step(variant: str, network: nn.Module, workload: Workload) -> dict[str, float]:
    """Run two steps of a variant; return the peaks over the second in GiB, `peak_gib` being the device's own."""
    run = make_step(variant, network, workload.token_ids(vocabulary(network)))
    run()
    gc.collect()
    if workload.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    reset_peaks(workload.device)
    run()
    found = peaks(workload.device)
    return {**found, "peak_gib": found.get("peak_allocated_gib", found["peak_rss_gib"])}


def vocabulary(network: nn.Module) -> int:
    """Return how many tokens a Hugging Face model knows."""
    config: Any = network.config
    return int(config.vocab_size)


def closed_form(variant: str, network: nn.Module, workload: Workload) -> int:
    """Return the least peak of a variant's step in bytes."""
    config: Any = network.config
    shape = {name: getattr(config, name) for name in llama_shape("nano")}
    tokens, itemsize = workload.batch * workload.tokens, workload.dtype.itemsize
    if variant == LIMIT:
        return footprint.limit_peak_bytes(shape, tokens=tokens, itemsize=itemsize)
    quantized = QUANTIZERS[variant].weights.enabled
    return footprint.rotated_peak_bytes(shape, tokens=tokens, itemsize=itemsize, quantized_weights=quantized)


def memory_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the peaks for people."""
    columns = ("workload", "variant", "allocated (GiB)", "reserved (GiB)", "closed form (GiB)", "÷ closed", "÷ limit")
    cells = [
        [
            row["workload"],
            row["variant"],
            f"{row['peak_gib']:.2f}",
            f"{row['peak_reserved_gib']:.2f}" if "peak_reserved_gib" in row else "–",
            f"{row['closed_form_gib']:.2f}",
            f"{row['peak_gib'] / row['closed_form_gib']:.2f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return facts.make_table("Peak memory against the closed forms", columns, cells)


def guard(section: Section) -> None:
    """Run the guard's modes side by side, on one device, and on two where there are two."""
    settings = section.settings
    rows: list[dict[str, Any]] = []
    for world_size in (1, 2):
        if settings.device == "cuda" and torch.cuda.device_count() < world_size:
            rows.append({"world_size": world_size, "missing": "needs two devices"})
        elif section.seconds_left > 0.3 * settings.seconds:
            rows += measure_guard(section, world_size=world_size)
        section.keep("guard", guard_table(rows), rows)


def measure_guard(section: Section, *, world_size: int) -> list[dict[str, Any]]:
    """Return a row a mode of the guard, or one that says why there is none."""
    settings = section.settings
    request = RankRequest(
        "w4a4",
        settings.model,
        batch=2,
        tokens=settings.tokens,
        modes=MODES,
        steps=settings.repetitions,
        dtype=settings.dtype,
        device=settings.device,
    )
    output = section.output.with_suffix(f".world-{world_size}")
    try:
        found = run_world(request, output, world_size=world_size, timeout=max(1.0, section.seconds_left - 2))
    except RuntimeError as error:
        return [{"world_size": world_size, "missing": " ".join(str(error).split())[-120:]}]
    off = spread(found["modes"]["off"]["seconds"]).median
    return [
        {"world_size": world_size, "mode": mode, "ratio": spread(row["seconds"]).median / off, **row}
        for mode, row in found["modes"].items()
    ]


def guard_table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the guard's figures for people."""
    columns = ("ranks", "sync_mode", "step (ms)", "÷ off", "allocated (GiB)", "reserved (GiB)", "unshards", "waits")
    return facts.make_table("The unshard guard's modes", columns, [_guard_cells(row) for row in rows])


def _guard_cells(row: dict[str, Any]) -> list[str]:
    if "missing" in row:
        return [str(row["world_size"]), row["missing"], *["–"] * 6]
    peak = [f"{row[name]:.2f}" if name in row else "–" for name in ("peak_allocated_gib", "peak_reserved_gib")]
    counts = [f"{row.get(name, 0.0):.0f}" for name in ("unshards", "barriers")]
    seconds = f"{1e3 * spread(row['seconds']).median:.1f}"
    return [str(row["world_size"]), row["mode"], seconds, f"{row['ratio']:.2f}", *peak, *counts]


SECTIONS = {"kernels": kernels, "steps": steps, "guard": guard}


def main(arguments: Sequence[str] | None = None) -> None:
    """Carry out one section."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("section", choices=list(SECTIONS))
    parser.add_argument("--output", type=Path, required=True)
    for option in fields(Settings):
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    options = vars(parser.parse_args(arguments))
    run, output = SECTIONS[options.pop("section")], options.pop("output")
    run(Section(output, Settings(**options)))


if __name__ == "__main__":
    main()
