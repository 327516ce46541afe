"""Measured tables between the marks of benchmarks/README.md, which `python -m benchmarks.all` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts

PAGE = Path(__file__).with_name("README.md")
END = "<!-- end of figures -->"
PLACE = re.compile(rf"<!-- figures of (\w+) -->.*?{re.escape(END)}", re.DOTALL)
OUTPUT = re.compile(r" --output ('[^']*'|\S+)")


def section(name: str, runs: Sequence[str]) -> str:
    """Return what is said of a benchmark's runs, between marks that the next rewriting finds."""
    return "\n\n".join([f"<!-- figures of {name} -->", *runs, END])


def figures(found: Mapping[str, Any]) -> str:
    """Return a run's tables, with commit, date, machine, load and command."""
    machine, versions = found["machine"], found["versions"]
    on = f"{machine['cores']} cores of {machine['processor']}, torch {versions['torch']}"
    where = ", ".join(machine.get("accelerators", [])) or on
    command = OUTPUT.sub("", found["command"])
    origin = f"({found['commit']}, {found['date'][:10]}, {where}, {load(machine)}: `{command}`)"
    return "\n\n".join([*(table(each) for each in found["tables"]), origin])


def table(made: facts.Table) -> str:
    """Return a table as Markdown, its title as the sentence that leads to it."""
    return facts.markdown(made).replace(made["title"], f"{made['title']}:", 1)


def load(machine: Mapping[str, Any]) -> str:
    """Return the load averages of the minute before a run and of its last."""
    ends = [machine["load_average_at_start"], machine["load_average"]]
    return "load " + " → ".join("unknown" if end is None else f"{end[0]:.1f}" for end in ends)


def rewrite(page: str, sections: Mapping[str, str]) -> str:
    """Return a page with these figures and no others; a section that has no place yet comes at the end.

    Raises:
        ValueError: the page has figures that none of the sections replaces.
    """
    places = PLACE.findall(page)
    if left := sorted({*places} - {*sections}):
        raise ValueError(f"figures of {', '.join(left)}: no program of benchmarks.all measures them; take them out")
    page = PLACE.sub(lambda place: sections[place[1]], page)
    added = [name for name in sections if name not in places]
    return "\n".join([page, *(f"## {name.replace('_', ' ').capitalize()}\n\n{sections[name]}\n" for name in added)])
