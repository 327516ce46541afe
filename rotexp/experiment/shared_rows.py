"""Figures of the untrained model that another job of the same sweep has measured already, known by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

import rotexp
from rotexp.config.composition import to_plain
from rotexp.experiment.context import Context
from rotexp.files.reading import UnreadableError, read_json
from rotexp.metrics.quality import Quality
from rotexp.quant.integer_products import has_integer_units
from rotexp.rotation.model import RotatedModel
from rotexp.runfolder.layout import JOBS_FILE
from rotexp.runfolder.records import readable_summary, revived
from rotexp.tracking.summary import versions

ROWS = ("float", "quantized", "start", "hadamard")
"""What does not depend on training, in the order in which it is measured."""
LABELS = ("name", "learned", "refresh_every")
"""Keys of `model`, `quant` and `rotation` that change no figure of theirs."""
STARTS = ("init", "path", "start", "_target_", "options")
"""Keys of `rotation` that say what training starts from, and nothing about Hadamard's."""


def share_rows(context: Context, model: RotatedModel, *, weights: str) -> None:
    """Take over what another job of the sweep has measured, say so, and keep the digests for those to come.

    Nothing is shared where parts of the user's own compute, whose code no digest knows.

    Args:
        weights: the digest of those that were read.
    """
    config, measurements = context.config, context.measurements
    if not config.evaluation.share_rows or config.plugins:
        return
    digests = row_digests(context, model, weights=weights)
    if measurements.stays_hadamard(model):
        del digests["hadamard"]  # which the merged model measures, up to rounding
    found = find_rows(context.folder, digests) if context.communication.rank == 0 else {}
    missing = [row for row in ROWS if row not in measurements.rows]
    origins = dict(context.taken_over.shared_rows)
    for row, quality in _agreed(context, {row: quality for row, (quality, _) in found.items()}).items():
        if row in missing:
            measurements.take_over(row, quality)
            if context.communication.rank == 0:
                origins[row] = found[row][1]
    for origin in dict.fromkeys(origins[row] for row in missing if row in origins):
        rows = ", ".join(row for row in missing if origins.get(row) == origin)
        context.messages.say(f"rows {rows} are those of {origin}; evaluation.share_rows=false measures them again")
    context.record.summary["shared_rows"] = {"digests": digests, "from": origins}


def row_digests(context: Context, model: RotatedModel, *, weights: str) -> dict[str, str]:
    """Return for each row 16 hex digits of all that its figures depend on, but for the rounding of `FloatAnswers`.

    What is trained decides which rotations act within quantizers, and whether codes are multiplied is the CPU's matter.
    """
    config, plain = context.config, to_plain(context.config)
    common = {
        "weights": weights,
        "model": _without(plain["model"], LABELS),
        "protocol": context.inputs.protocol,
        "windows": context.measurements.batch,
        "sharding": plain["sharding"],
        "world_size": context.communication.world_size,
        "device": torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else context.device.type,
        "threads": torch.get_num_threads(),
        "params": plain["train"]["params"],
        "versions": versions(),
        "code": _code_digest(),
    }
    quantized = common | {"quant": _without(plain["quant"], LABELS), "integer_units": has_integer_units()}
    rotated = quantized | {"rotation": _without(plain["rotation"], LABELS + STARTS), "seed": config.seed}
    start = rotated | {"rotations": _rotations_digest(model)}
    return {row: _digest(facts) for row, facts in zip(ROWS, (common, quantized, start, rotated), strict=True)}


def find_rows(folder: Path, digests: Mapping[str, str]) -> dict[str, tuple[Quality, str]]:
    """Return the rows that finished jobs of a run's sweep have measured, and the folder, below the sweep's, of each."""
    found: dict[str, tuple[Quality, str]] = {}
    for below, summary in _finished_jobs(folder):
        theirs = _mapping(summary, "shared_rows")
        known, origins, figures = _mapping(theirs, "digests"), _mapping(theirs, "from"), _mapping(summary, "evaluation")
        for row, digest in digests.items():
            if row not in found and row in figures and known.get(row) == digest:
                found[row] = Quality(**revived(figures[row])), origins.get(row, below)
    if not {"float", "quantized"} <= found.keys():
        return {row: pair for row, pair in found.items() if row not in ("float", "quantized")}
    return found


def _finished_jobs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the folder and the summary of each job that is done, of the sweep in which a run's folder lies."""
    sweep = next((above for above in folder.absolute().parents if (above / JOBS_FILE).is_file()), None)
    if sweep is None:
        return
    try:
        jobs = read_json(sweep / JOBS_FILE, list)
    except UnreadableError:
        return  # the sweep itself will say so
    for job in jobs:
        if job.get("status") == "done" and job.get("below"):
            yield job["below"], readable_summary(sweep / job["below"])


def _mapping(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return what another run's file has under a key; nothing where that is no mapping."""
    held = facts.get(key)
    return held if isinstance(held, Mapping) else {}


def _agreed(context: Context, found: Mapping[str, Quality]) -> dict[str, Quality]:
    """Return on every rank what the first one found (a collective)."""
    width = len(fields(Quality))
    missing = [0.0] * (1 + width)
    table = [[1.0, *astuple(found[row])] if row in found else missing for row in ROWS]
    agreed = context.communication.broadcast_(torch.tensor(table, dtype=torch.float64, device=context.device))
    return {row: Quality(*figures) for row, (there, *figures) in zip(ROWS, agreed.tolist(), strict=True) if there}


def _without(group: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _rotations_digest(model: RotatedModel) -> str:
    """Return the digest of what the bank holds."""
    digest = hashlib.sha256()
    for name, matrix in model.bank.items():
        digest.update(name.encode())
        digest.update(matrix.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def _code_digest() -> str:
    """Return the digest of rotexp's own files, of which a version may stand for several while it is worked on."""
    digest, root = hashlib.sha256(), Path(rotexp.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
