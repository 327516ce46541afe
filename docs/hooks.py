"""What the documentation is built with beside its pages: tables and reference pages from the code, and no network."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from rotexp.config.composition import to_config
from rotexp.launch.command_line import register
from rotexp.metrics.keys import METRICS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rotexp"
CONF = ROOT / "conf"
ROOMS = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))
OF_OWN_PARTS = ("_target_", "options")
"""Fields of a group by which it takes a part of the user's own: another page tells of them."""
OF_INTRODUCTION = "{members: false, show_root_heading: false, show_root_toc_entry: false}"
"""Options by which the docstring of a package stands at the head of a page."""
LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*\shref=\"?(?:https?:)?//")
"""What makes a browser fetch something from elsewhere; plain links to other places are welcome."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a page for each room of the package behind the written pages of the reference."""
    assert config.nav is not None
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    reference += [{f"rotexp.{room}": f"reference/{room}.md"} for room in ROOMS]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pages = {room: room_page(room) for room in ROOMS} | {"public-face": face_page()}
    pages |= {"keys-of-runs": keys_page(), "keys-of-metrics": metrics_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that a browser could not show without the network.

    Raises:
        PluginError: a script, style, picture or font of the page lies elsewhere.
    """
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri}: loads {output[found.start() : found.end() + 40]} from the network")
    return output


def room_page(room: str) -> str:
    """Return the reference page of one room: what it is for, then its modules in the order of their names."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in sorted((PACKAGE / room).rglob("*.py"))
    ]
    own = [module for module in modules if not module.endswith("__init__")]
    parts = [
        f"# rotexp.{room}",
        f"::: rotexp.{room}\n    options: {OF_INTRODUCTION}",
    ]
    return "\n\n".join([*parts, *(f"::: {module}" for module in own)]) + "\n"


def face_page() -> str:
    """Return the page of what `import rotexp` gives, functions first; it is read from the package's own imports."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rotexp.")
    ]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    names = sorted(homes, key=lambda name: (name[0].isupper(), name))
    parts = ["# Public face", f"::: rotexp\n    options: {OF_INTRODUCTION}"]
    parts += [f"::: {homes[name]}.{name}\n    options: {{heading: rotexp.{name}, toc_label: {name}}}" for name in names]
    return "\n\n".join(parts) + "\n"


def keys_page() -> str:
    """Return the page of every key of a run, with the values that hold when nothing is chosen."""
    register()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        config = to_config(compose("config"))
    groups = [option.name for option in fields(config) if is_dataclass(getattr(config, option.name))]
    introduction = (
        "# Configuration keys\n\n"
        "Every key of a run, as `python -m rotexp.train KEY=VALUE` sets it, with its value where no option is chosen. "
        "An option of a group (`GROUP=OPTION`, a file of `conf/`) sets several of its keys at once. "
        "What is [your own](../extending.md) has the keys of its class."
    )
    parts = [introduction, keys_table(config, "", of_root=True)]
    for group in groups:
        parts += [f"## {group}", keys_table(getattr(config, group), f"{group}."), options_table(group)]
    return "\n\n".join([*parts, "## experiment", options_table("experiment")]) + "\n"


def keys_table(options: Any, prefix: str, *, of_root: bool = False) -> str:
    """Return what a dataclass of options is for, and a table of its keys."""
    intent = "" if of_root else f"{(type(options).__doc__ or '').strip().splitlines()[0]}\n\n"
    rows = [row for row in key_rows(options, prefix) if not (of_root and "." in row[0])]
    return intent + table(("key", "value", "meaning"), rows)


def options_table(group: str) -> str:
    """Return a table of the options of a group, each with the comment that its file opens with; "" if it has none."""
    rows = []
    for file in sorted((CONF / group).glob("*.yaml")):
        lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
        said = [line.removeprefix("#").strip() for line in lines if "@package" not in line]
        rows.append(
            (f"`{group}={file.stem}`", " ".join(takewhile(lambda line: line.partition(":")[0] != "Command", said)))
        )
    return table(("option", "what it is"), rows) if rows else ""


def key_rows(options: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and meaning of every option, nested ones with their dotted names."""
    meanings = attribute_meanings(options)
    for option in fields(options):
        value = getattr(options, option.name)
        if is_dataclass(value):
            yield from key_rows(value, f"{prefix}{option.name}.")
        elif option.name not in OF_OWN_PARTS:
            yield f"`{prefix}{option.name}`", shown(value), meanings.get(option.name, "")


def attribute_meanings(options: Any) -> dict[str, str]:
    """Return what the docstrings of a dataclass, and of those it extends, say of its attributes."""
    found: dict[str, str] = {}
    for kind in reversed(type(options).__mro__[:-1]):
        section = (kind.__doc__ or "").partition("Attributes:")[2]
        for names, meaning in re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", section, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return found


def shown(value: Any) -> str:
    """Return a value as one writes it on the command line, and what else an enumeration allows."""
    if isinstance(value, Enum):
        others = ", ".join(f"`{choice.name}`" for choice in type(value) if choice is not value)
        return f"`{value.name}` (or {others})" if others else f"`{value.name}`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def metrics_page() -> str:
    """Return the page of every metric, one table for each beginning of their names."""
    introduction = (
        "# Metric keys\n\n"
        "Every series of `metrics.jsonl`, and of W&B, over the optimizer's steps. `<phase>` and `<row>` stand for a "
        "phase of the run and a row of its table. The last column is what W&B's summary keeps."
    )
    groups: dict[str, list[tuple[str, ...]]] = {}
    for metric in METRICS:
        row = (f"`{metric.name}`", metric.unit, metric.meaning, metric.wandb_summary)
        groups.setdefault(metric.name.partition("/")[0], []).append(row)
    tables = [f"## {group}\n\n{table(('key', 'unit', 'meaning', 'summary'), rows)}" for group, rows in groups.items()]
    return "\n\n".join([introduction, *tables]) + "\n"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
