"""Read the files of a run's folder as far as they can be read, and name what cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rotexp.files import reading

Complain = Callable[[str], None]
"""Takes what is wrong with a file, in one line."""

Held = TypeVar("Held")


def readable_json(file: Path, complain: Complain) -> dict[str, Any] | None:
    """Return the object a file holds, None where it cannot be read."""
    return _read(file, reading.read_json, complain)


def readable_list(file: Path, complain: Complain) -> list[Any]:
    """Return the list a file holds, empty where it cannot be read."""
    return _read(file, lambda path: reading.read_json(path, list), complain) or []


def readable_yaml(file: Path, complain: Complain) -> dict[str, Any] | None:
    """Return the mapping a file holds, None where it cannot be read."""
    return _read(file, reading.read_yaml, complain)


def readable_rows(file: Path, complain: Complain) -> list[dict[str, Any]]:
    """Return the objects of a file that holds one a line; lines that cannot be read are left out, and named."""
    rows = _read(file, reading.read_rows, complain) or reading.Rows()
    if rows.damaged:
        complain(f"{file.name}: {rows.places}; the others are shown")
    return rows.whole


def _read(file: Path, read: Callable[[Path], Held], complain: Complain) -> Held | None:
    try:
        return read(file)
    except reading.UnreadableError as error:
        complain(f"{file.name} cannot be read ({error.reason})")
        return None


def number(value: Any) -> float | None:
    """Return a logged number, also one written as `nan`, `inf` or `-inf`; None for anything else."""
    given = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if given or value in ("nan", "inf", "-inf") else None
    except OverflowError:
        return None


def dig(mapping: Any, *keys: str) -> Any:
    """Return what lies under nested keys, None where a level is missing or no mapping."""
    for key in keys:
        mapping = mapping.get(key) if isinstance(mapping, dict) else None
    return mapping
