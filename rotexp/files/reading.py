"""Read files that a crash, a full disk or a person may have damaged: what they hold, or in words what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

KINDS: dict[type[Any], str] = {dict: "mapping", list: "list"}


class UnreadableError(ValueError):
    """A file that cannot be read, or holds something else; `reason` says why."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: cannot be read ({reason}); restore it")
        self.reason = reason


def read_json(file: Path, kind: type[Any] = dict) -> Any:
    """Return the JSON value of a file, which must be of that kind (a dict or a list).

    Raises:
        UnreadableError: there is no such file, it is damaged, or holds something else.
    """
    return _parsed(file, json.loads, kind)


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping of plain values that a YAML file holds, dates and the like as text.

    Raises:
        UnreadableError: there is no such file, it is damaged, or holds something else.
    """
    mapping: dict[str, Any] = _parsed(file, lambda text: _plain(yaml.load(text, LOADER)), dict)
    return mapping


def read_text(file: Path) -> str:
    """Return the text of a file that is to hold some.

    Raises:
        UnreadableError: there is no such file, it is no UTF-8, or nothing a person or a program wrote.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(file, f"byte {error.start} is no UTF-8") from None
    except OSError as error:
        raise UnreadableError(file, str(error.strerror)) from None
    if "\0" in text:
        raise UnreadableError(file, "it holds NUL bytes, as a crash leaves them")
    if not text.strip():
        raise UnreadableError(file, "it is empty")
    return text


def lost_target(path: Path) -> Path | None:
    """Return what a link leads to that is not there (any more, as blobs of the hub's cache); None if all is well."""
    return path.readlink() if path.is_symlink() and not path.exists() else None


def _parsed(file: Path, parse: Callable[[str], Any], kind: type[Any]) -> Any:
    text = read_text(file)
    try:
        found = parse(text)
    except RecursionError:
        raise UnreadableError(file, "it is nested too deeply") from None
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UnreadableError(file, " ".join(str(error).split())) from None
    if not isinstance(found, kind):
        raise UnreadableError(file, f"it holds no {KINDS[kind]}")
    return found


def _plain(value: Any) -> Any:
    """Return what YAML holds as JSON would; it may hold dates, bytes, and itself."""
    return json.loads(json.dumps(value, default=str))


@dataclass(frozen=True)
class Rows:
    """What a file of one JSON object a line holds.

    Attributes:
        whole: the objects, each with a whole number `step`.
        damaged: the numbers, from 1, of the other lines.
        lines: how many there are.
    """

    whole: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    lines: int = 0

    @property
    def places(self) -> str:
        """Which lines are damaged, in words."""
        few = len(self.damaged) == 1
        first = f"line {self.damaged[0]}" if few else f"{len(self.damaged)} lines, the first is line {self.damaged[0]}"
        return f"{first} of {self.lines} cannot be read"


def read_rows(file: Path) -> Rows:
    """Return what can be read of a file of rows, nothing where there is no such file.

    Raises:
        UnreadableError: it is no file, or may not be read.
    """
    try:
        lines = file.read_bytes().splitlines() if file.exists() else []
    except OSError as error:
        raise UnreadableError(file, str(error.strerror)) from None
    rows = Rows(lines=len(lines))
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            rows.damaged.append(number)
        else:
            rows.whole.append(row)
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
