"""What every benchmark leaves behind: a table for people, and JSON with the machine, the versions and the command."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rotexp.process.processor import processor
from rotexp.recipes.origin import commit_of

PACKAGES = ("rotexp", "torch", "transformers", "accelerate", "hydra-core", "geoopt", "brevitas")
NOT_INSTALLED = "not installed"
ROOT = Path(__file__).parents[1]
MADE = ("benchmarks/README.md",)
"""Files that figures are written into, and whose changes therefore change no figure."""


def load_average() -> tuple[float, float, float] | None:
    """Return how many processes wanted a core in the last 1, 5 and 15 minutes, or None where nobody counts them."""
    return os.getloadavg() if hasattr(os, "getloadavg") else None


STARTED, LOAD_AT_START = time.monotonic(), load_average()
"""When a program imported this, which is what it does first."""

Table = dict[str, Any]
"""A table: `title`, `columns`, and `rows` of as many cells, all of them text."""


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Put rows of text under columns."""
    assert all(len(row) == len(columns) for row in rows), "every row must have a cell for every column"
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


def markdown(table: Table) -> str:
    """Return a table as aligned Markdown, which serves on a terminal as well as in a page."""
    rows = [table["columns"], *table["rows"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, " | ".join(rule))
    return "\n".join([table["title"], "", *(f"| {line} |" for line in lines)])


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a figure."""
    return {"python": platform.python_version(), **{package: installed_version(package) for package in PACKAGES}}


def installed_version(package: str) -> str:
    """Return a package's version, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the memory in GiB, the load at both ends, torch's threads, the accelerators."""
    facts: dict[str, Any] = {"system": platform.platform(), "processor": processor(), "cores": os.cpu_count()}
    if hasattr(os, "sysconf"):
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    facts |= {"load_average_at_start": LOAD_AT_START, "load_average": load_average()}
    if torch := sys.modules.get("torch"):
        facts["threads"] = torch.get_num_threads()
        facts["accelerators"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def command() -> str:
    """Return the command that this process was started by."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name}" if spec is not None else sys.argv[0]
    return f"python {program} {shlex.join(sys.argv[1:])}".strip()


def report(output: Path | None, tables: Sequence[Table], figures: Mapping[str, Any]) -> None:
    """Print the tables, and write them and the figures they are made of as JSON.

    Args:
        output: the file, or None to write none.
        figures: plain values by name.
    """
    for table in tables:
        print(f"{markdown(table)}\n", flush=True)
    if output is not None:
        write_json(output, {**environment(), "figures": dict(figures), "tables": list(tables)})


def environment() -> dict[str, Any]:
    """Return when, how long, of which commit, by which command, where and with which versions figures were taken."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": time.monotonic() - STARTED,
        "commit": commit(),
        "command": command(),
        "machine": machine(),
        "versions": versions(),
    }


def commit() -> str | None:
    """Return the commit of the working tree, with `CHANGED` behind it if files differ; None outside of a repository."""
    return commit_of(ROOT, deciding=(".", *(f":!{file}" for file in MADE)))


def write_json(path: Path, content: Any) -> None:
    """Write a file anew; a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return what `write_json` wrote."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def parser(description: str | None, *, output: str, repetitions: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    shared = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    shared.add_argument("--output", type=Path, default=Path(output), help="the JSON file")
    shared.add_argument("--repetitions", type=int, default=repetitions, help="rounds over all variants that are kept")
    shared.add_argument("--threads", type=int, default=None, help="CPU threads (None: torch's choice)")
    return shared
