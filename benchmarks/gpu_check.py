"""Everything worth measuring on an accelerator, in at most four minutes: `bash benchmarks/gpu_check.sh`.

Needs torch and transformers and this repository. Each section has a time of its own; what one leaves goes to the next.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts

TOTAL_SECONDS = 230.0
BUDGETS = {"kernels": 50.0, "steps": 110.0, "guard": 65.0}
"""Seconds of each section, its imports included."""

GRACE_SECONDS = 3.0
"""How much longer than its budget a section may take before it is ended."""


def run_sections(budgets: dict[str, float], options: Sequence[str], *, total: float) -> dict[str, Any]:
    """Run the sections one after the other and collect what they left.

    Args:
        budgets: seconds of each section.
        options: handed to every section.
        total: seconds of all of them together; none starts that has less than half its budget left.
    """
    found: dict[str, Any] = {"tables": [], "figures": {}, "sections": {}}
    limit = time.monotonic() + total
    with tempfile.TemporaryDirectory() as place:
        for name, budget in budgets.items():
            left = limit - time.monotonic()
            output = Path(place) / f"{name}.json"
            enough = left >= 0.5 * budget
            state = run_section(name, output, min(budget, left), options) if enough else "skipped: no time left"
            found["sections"][name] = state
            if output.exists():
                content = facts.read_json(output)
                found["machine"] = content["machine"]
                found["tables"] += content["tables"]
                found["figures"] |= content["figures"]
    return found


def run_section(name: str, output: Path, seconds: float, options: Sequence[str]) -> str:
    """Run one section in a process, and return how it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu_sections", name, "--output", str(output)]
    began = time.monotonic()
    try:
        finished = subprocess.run(
            [*command, "--seconds", str(seconds), *options],
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            timeout=seconds + GRACE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s"
    if finished.returncode:
        return f"failed: {' '.join(finished.stderr.split())[-400:]}"
    return f"done in {time.monotonic() - began:.0f} s"


def section_table(sections: dict[str, str]) -> facts.Table:
    """Return how the sections ended, for people."""
    return facts.make_table("Sections", ("section", "state"), [[name, state] for name, state in sections.items()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every section, print the tables and write the figures; return 1 if a section failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--sections", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--total", type=float, default=TOTAL_SECONDS, help="seconds for everything")
    options, rest = parser.parse_known_args(arguments)
    budgets = {name: BUDGETS[name] for name in options.sections}
    found = run_sections(budgets, rest, total=options.total)
    content = {**facts.environment(), **found}
    for table in [*found["tables"], section_table(found["sections"])]:
        print(f"{facts.markdown(table)}\n", flush=True)
    facts.write_json(options.output, content)
    return int(any(not state.startswith("done") for state in found["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
