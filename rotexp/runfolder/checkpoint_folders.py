"""The folders of checkpoints in a run's folder: how they are called, what completes one, which one is the newest.

Imports no torch, since a launcher asks before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rotexp.files.folders import flush, write_atomically
from rotexp.files.reading import UnreadableError, read_json
from rotexp.runfolder.layout import CHECKPOINTS_FOLDER

LATEST = "latest"
"""The file that names the newest checkpoint; written last."""
FACTS = "facts.json"
"""The file that completes a checkpoint: it lists every other file."""
KINDS: dict[str, type[Any]] = {"step": int, "world_size": int, "files": dict, "facts": dict}
"""What it holds."""
NEEDED: dict[str, type[Any] | tuple[type[Any], ...]] = {
    "base.digest": str,
    "base.model": str,
    "config.train.params": str,
    "evaluation.protocol": dict,
    "phases": dict,
    "state.seconds": (int, float),
    "tracker": dict,
}
"""What a run goes on from, of the facts it kept: dotted keys, and the kinds of their values."""
FORMAT = 2
"""1 held the best rotations alone, and not why they were the best."""
DIGESTED_BYTES = 64 * 2**20
"""Files up to this size are known by their digest too, larger ones by their size alone."""
NAME = re.compile(r"step-(\d{8})|\.step-(\d{8})\.replaced")
"""A checkpoint, or one that was being replaced by another of its step when the run died."""


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint, if there is one, and which newer ones were skipped and why."""

    path: Path | None = None
    skipped: list[str] = field(default_factory=list)


def find_checkpoint(folder: Path) -> Found:
    """Find the newest complete checkpoint that a run can go on from.

    Args:
        folder: that of a run, or of one checkpoint.
    """
    single = (folder / FACTS).exists() or NAME.fullmatch(folder.name)
    skipped: list[str] = []
    for candidate in [folder] if single else reversed(_checkpoints(folder / CHECKPOINTS_FOLDER)):
        fault = fault_of(candidate) or _lacks(read_facts(candidate)["facts"])
        if not fault:
            return Found(candidate, skipped)
        skipped.append(f"{candidate}: {fault}")
    return Found(None, skipped)


def fault_of(path: Path, *, digests: bool = True) -> str:
    """Say why a checkpoint is not complete; empty if it is.

    Args:
        digests: whether to read its files, or only to look at their sizes.
    """
    try:
        files = read_facts(path)["files"]
        if not files:
            return f"{FACTS} names no other file"
        for name, entry in files.items():
            if fault := _file_fault(path / name, entry, digests=digests):
                return f"{name} {fault}"
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())
    except (KeyError, TypeError):
        return f"{FACTS} is not that of a checkpoint of rotexp"
    return ""


def _lacks(facts: dict[str, Any]) -> str:
    """Say what a run needs of a checkpoint's facts and they do not hold; empty if they hold all of it."""
    for key, kind in NEEDED.items():
        value: Any = facts
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            return f"{FACTS} is not that of a run (facts.{key} is missing, or of another kind)"
    return ""


def read_facts(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself.

    Raises:
        ValueError: it is no checkpoint, or one of another format.
    """
    if not path.is_dir():
        raise ValueError("there is no such folder")
    if not (path / FACTS).is_file():
        raise ValueError(f"it holds no {FACTS}, so it was not completed, or is no checkpoint of rotexp")
    try:
        facts: dict[str, Any] = read_json(path / FACTS)
    except UnreadableError as error:
        raise ValueError(f"{FACTS} cannot be read ({error.reason})") from None
    if not {"format", *KINDS} <= facts.keys():
        raise ValueError(f"{FACTS} is not that of a checkpoint of rotexp")
    if facts["format"] != FORMAT:
        raise ValueError(f"its format is {facts['format']}, and this version reads {FORMAT}")
    if any(not isinstance(facts[key], kind) for key, kind in KINDS.items()):
        raise ValueError(f"{FACTS} is not that of a checkpoint of rotexp")
    return facts


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies in a run's folder."""
    return folder / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def aside_of(path: Path) -> Path:
    """Return where a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.tmp")


def prepare_aside(path: Path) -> None:
    """Make the folder in which a checkpoint is written, and remove what earlier crashes left half written."""
    for stale in path.parent.glob(".step-*.tmp"):
        shutil.rmtree(stale)
    aside_of(path).mkdir(parents=True)


def complete(path: Path, *, step: int, world_size: int, facts: dict[str, Any]) -> None:
    """Complete what was written aside, bring it to its place, and let the pointer name it, in this order.

    One of the same step that is there already is replaced; at every moment one of the two is complete in the folder.
    """
    aside, replaced = aside_of(path), path.with_name(f".{path.name}.replaced")
    files = {file.name: _entry(file) for file in sorted(aside.iterdir())}
    text = json.dumps({"format": FORMAT, "step": step, "world_size": world_size, "files": files, "facts": facts})
    write_atomically(aside / FACTS, f"{text}\n")
    flush(aside)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    aside.rename(path)
    flush(path.parent)
    write_atomically(path.parent / LATEST, f"{path.name}\n")


def retain(path: Path, *, keep: int) -> None:
    """Remove what is older than the newest `keep` complete checkpoints, counted from the one just completed.

    Those of later steps are of a future that the run, continued from an earlier step, has left; they go too, since the
    newest is what the next run continues from. Broken ones among those kept stay for whoever wants to know why.
    """
    kept = 0
    for candidate in reversed(_checkpoints(path.parent)):
        if candidate.name.startswith(".") or candidate.name > path.name or kept == keep:
            shutil.rmtree(candidate)
        elif candidate == path or not fault_of(candidate, digests=False):
            kept += 1


def _checkpoints(folder: Path) -> list[Path]:
    """Return the folders called like checkpoints by ascending step, of two of one step the replaced one first."""
    if not folder.is_dir():
        return []
    return sorted(_named(folder), key=lambda path: (path.name.strip(".")[: len("step-00000000")], path.name[0] != "."))


def _named(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if NAME.fullmatch(path.name))


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"size": size, "sha256": _digest(file) if size <= DIGESTED_BYTES else None}


def _file_fault(file: Path, entry: dict[str, Any], *, digests: bool) -> str:
    if not file.is_file():
        return "is missing"
    if (size := file.stat().st_size) != entry["size"]:
        return f"is {'truncated' if size < entry['size'] else 'too long'} ({size} instead of {entry['size']} bytes)"
    if digests and entry["sha256"] is not None and _digest(file) != entry["sha256"]:
        return "was changed (its digest is another)"
    return ""


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
