"""Reads what an offline W&B run recorded, for the tests of what is sent there."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record


def records(folder: Path, kind: str) -> list[Any]:
    """Return the records of a kind in a folder's offline runs, in the order the runs were made."""
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_ctime_ns)
    every = [record for file in files for record in whole(file)]
    return [getattr(record, kind) for record in every if record.WhichOneof("record_type") == kind]


def whole(file: Path, *, seconds: float = 10.0) -> list[Record]:
    """Return a run's records once the last is written, which W&B may do a little after `finish` has returned."""
    until = time.monotonic() + seconds
    while True:
        found = recorded(file)
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < until, f"{file} has no end"
        time.sleep(0.01)


def recorded(file: Path) -> list[Record]:
    """Return the records that a run's file holds so far."""
    return [Record.FromString(payload) for payload in payloads(file.read_bytes())]


def row_of(history: Any) -> dict[str, Any]:
    """Return the values of a record of history by their keys, W&B's own among them."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def payloads(data: bytes, *, block: int = 32768, header: int = 7) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format.

    It is made of chunks, each with its length and kind (whole, first, middle, last), none across two blocks.
    """
    position, begun = header, b""
    while position + header <= len(data):
        if block - position % block < header:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        begun += data[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):
            yield begun
            begun = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows in a folder's W&B runs, as `metrics.jsonl` would have them, ordered by keys."""
    rows = []
    for record in records(folder, "history"):
        row = row_of(record)
        step = {"step": row.pop("_step")}
        rows.append(step | {key: row[key] for key in sorted(row) if not key.startswith("_")})
    return rows
