"""Read the files of a run's folder as far as they can be read, and name what cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Held = TypeVar("Held", dict[str, Any], list[Any])
Complain = Callable[[str], None]
"""Takes what is wrong with a file, in one line."""


def read_json(file: Path, complain: Complain) -> dict[str, Any] | None:
    """Return the object a file holds, None where it cannot be read."""
    return _read(file, json.loads, dict, complain)


def read_json_list(file: Path, complain: Complain) -> list[Any]:
    """Return the list a file holds, empty where it cannot be read."""
    return _read(file, json.loads, list, complain) or []


def read_yaml(file: Path, complain: Complain) -> dict[str, Any] | None:
    """Return the mapping a file holds, None where it cannot be read."""
    return _read(file, lambda text: yaml.load(text, LOADER), dict, complain)


def _read(file: Path, parse: Callable[[str], Any], kind: type[Held], complain: Complain) -> Held | None:
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        complain(f"{file.name} cannot be read ({error.strerror})")
    except (ValueError, yaml.YAMLError) as error:
        complain(f"{file.name} cannot be read ({' '.join(str(error).split())})")
    else:
        if isinstance(found, kind):
            return found
        complain(f"{file.name} cannot be read (it holds no {kind.__name__})")
    return None


def read_rows(file: Path, complain: Complain) -> list[dict[str, Any]]:
    """Return the objects of a file that holds one a line; lines that cannot be read are left out, and named."""
    try:
        lines = file.read_bytes().splitlines() if file.exists() else []
    except OSError as error:
        complain(f"{file.name} cannot be read ({error.strerror})")
        return []
    rows, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            damaged.append(number)
    if damaged:
        places = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first is line {damaged[0]}"
        complain(f"{file.name}: {places} of {len(lines)} cannot be read; the others are shown")
    return rows


def number(value: Any) -> float | None:
    """Return a logged number, also one written as `nan`, `inf` or `-inf`; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def dig(mapping: Any, *keys: str) -> Any:
    """Return what lies under nested keys, None where a level is missing or no mapping."""
    for key in keys:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping
