"""Upload recorded runs to W&B: offline runs as they are, others rebuilt from the files of their folders."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rotexp.files.reading import read_yaml
from rotexp.process.saying import PREFIX, tell
from rotexp.runfolder.layout import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, WANDB_FOLDER
from rotexp.runfolder.records import read_metrics, read_summary, revived
from rotexp.tracking.limits import check_tracker
from rotexp.tracking.options import TrackerConfig, TrackerKind, WandbMode
from rotexp.tracking.wandb import WandbMirror, has_key, offline_runs


def upload(places: Sequence[Path], *, rebuild: bool) -> int:
    """Upload every run in the folders, and return the exit code: 1 if one could not be.

    Args:
        rebuild: rebuild runs from their files even where there is an offline run.

    Raises:
        ValueError: a folder holds no run, nobody is logged in, or several runs would become one; nothing was uploaded
            then.
    """
    runs = [run for place in places for run in find_runs(place)]
    if not has_key():
        raise ValueError("not logged in to W&B, nothing was uploaded; run `wandb login`, or set WANDB_API_KEY")
    run_id, anew = os.environ.get("WANDB_RUN_ID"), [run for run in runs if rebuild or not _has_wandb_run(run)]
    if run_id is not None and len(anew) > 1:
        raise ValueError(f"WANDB_RUN_ID={run_id}: would make one W&B run of the {len(anew)} to upload; unset it")
    logging.basicConfig(level=logging.WARNING, format=f"{PREFIX}%(message)s")
    return max(_upload_run(run, rebuild=rebuild) for run in runs)


def find_runs(place: Path) -> list[Path]:
    """Return a folder if it is a run's, else the folders of all runs below it.

    Raises:
        ValueError: there is none.
    """
    if not place.is_dir():
        raise ValueError(f"{place}: no such folder; name the folder of a run or of a sweep")
    runs = [place] if _is_run(place) else sorted({path.parent for path in place.rglob(SUMMARY_FILE)})
    if not runs:
        raise ValueError(f"{place}: holds no run; name the folder of a run or of a sweep")
    return runs


def replay(folder: Path, *, mode: WandbMode) -> str | None:
    """Send a run's recorded rows, end state and rotations through the mirror that a live run has.

    Returns:
        What W&B calls the new run; None if it failed, which is logged.

    Raises:
        ValueError: a file of the run cannot be read.
    """
    plain = read_plain_config(folder)
    rows, summary = read_metrics(folder), revived(read_summary(folder))
    tracker = _tracker(plain, mode)
    check_tracker(tracker)
    mirror = WandbMirror(tracker, folder, plain_config=plain)
    for row in revived(rows):
        step = row.pop("step")
        mirror.log(row, step=step)
    complete = mirror.complete() and not mirror.fell_back
    mirror.finish(summary, exit_code=0 if summary.get("status") == "done" else 1)
    return mirror.run_id if complete else None


def read_plain_config(folder: Path) -> dict[str, Any]:
    """Return a run's configuration as nested dicts.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    plain = read_yaml(folder / CONFIG_FILE)
    return {key: value for key, value in plain.items() if key != "defaults"}


def _upload_run(folder: Path, *, rebuild: bool) -> int:
    offline = offline_runs(folder)
    if offline and not rebuild:
        command = [sys.executable, "-m", "wandb", "sync", *(f"{WANDB_FOLDER}/{path.name}" for path in offline)]
        return int(subprocess.run(command, check=False, cwd=folder).returncode != 0)  # there it leaves its log
    if _online_runs(folder) and not rebuild:
        sys.stdout.write(f"{folder}: was uploaded before; --rebuild uploads it as a new run\n")
        return 0
    run_id = _rebuild(folder)
    sys.stdout.write(f"{folder}: " + (f"rebuilt as {run_id}\n" if run_id else "was not uploaded\n"))
    return int(run_id is None)


def _rebuild(folder: Path) -> str | None:
    """Replay a run online; a failure is said, and leaves nothing that looks like a run that was uploaded."""
    before = _online_runs(folder)
    run_id = None
    try:
        run_id = replay(folder, mode=WandbMode.online)
    except ValueError as error:
        tell(error)
    if run_id is None:
        for left in _online_runs(folder) - before:
            shutil.rmtree(left, ignore_errors=True)
    return run_id


def _has_wandb_run(folder: Path) -> bool:
    return bool(offline_runs(folder) or _online_runs(folder))


def _online_runs(folder: Path) -> set[Path]:
    return set((folder / WANDB_FOLDER).glob("run-*"))


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file() or (folder / SUMMARY_FILE).is_file()


def _tracker(plain: dict[str, Any], mode: WandbMode) -> TrackerConfig:
    """Return the run's own tracker options, as far as this version knows them, but W&B in that mode."""
    known = {field.name for field in fields(TrackerConfig)} - {"kind", "mode", "_target_", "options"}
    options = {name: value for name, value in (plain.get("tracker") or {}).items() if name in known}
    return TrackerConfig(kind=TrackerKind.wandb, mode=mode, **options)
