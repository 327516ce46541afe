"""Put measured tables into the page: `python -m benchmarks.page step=step.json …` rewrites benchmarks/README.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import facts

PAGE = Path(__file__).with_name("README.md")
END = "<!-- end of figures -->"


def section(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the figures of one or more runs of a benchmark, between marks that the next rewriting finds."""
    return "\n\n".join([start(name), *(figures(run) for run in runs), END])


def figures(found: dict[str, Any]) -> str:
    """Return a run's tables with date, machine and command."""
    machine, versions = found["machine"], found["versions"]
    on = f"{machine['cores']} cores of {machine['processor']}, torch {versions['torch']}"
    accelerators = ", ".join(machine.get("accelerators", []))
    origin = f"({found['date'][:10]}, {accelerators or on}: `{found['command']}`)"
    tables = [facts.markdown(table).replace(table["title"], f"{table['title']}:", 1) for table in found["tables"]]
    return "\n\n".join([*tables, origin])


def start(name: str) -> str:
    """Return the mark before a benchmark's figures."""
    return f"<!-- figures of {name} -->"


def rewrite(page: str, sections: dict[str, str]) -> str:
    """Replace the figures of every named benchmark in a page.

    Raises:
        ValueError: the page has no place for one.
    """
    for name, text in sections.items():
        place = re.compile(f"^FIGURES:{name}$|{re.escape(start(name))}.*?{re.escape(END)}", re.DOTALL | re.MULTILINE)
        page, count = place.subn(lambda _, text=text: text, page, count=1)  # type: ignore[misc]
        if not count:
            raise ValueError(f"{name}: the page has no place for its figures; add a line FIGURES:{name}")
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the page from JSON files."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("figures", nargs="+", help="NAME=FILE, such as step=step.json; a NAME may come again")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, file in (text.split("=", 1) for text in options.figures):
        runs.setdefault(name, []).append(facts.read_json(Path(file)))
    sections = {name: section(name, found) for name, found in runs.items()}
    options.page.write_text(rewrite(options.page.read_text(encoding="utf-8"), sections), encoding="utf-8")


if __name__ == "__main__":
    main()
