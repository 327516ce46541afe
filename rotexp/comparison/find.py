"""Find runs in folders, and jobs of sweeps that left none; each once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rotexp.comparison.reading import Complain, readable_list
from rotexp.comparison.runs import Run, path_text, read_run
from rotexp.runfolder.layout import CHECKPOINTS_FOLDER, JOBS_FILE, SUMMARY_FILE, WANDB_FOLDER

OWN_FOLDERS = (CHECKPOINTS_FOLDER, WANDB_FOLDER)
"""Folders of a run that hold no other runs."""


def read_runs(folders: Sequence[Path], *, complain: Complain) -> list[Run]:
    """Read every run at or below the folders, in the order of their names.

    Args:
        complain: takes what is wrong with a file that is no run's.

    Raises:
        ValueError: one of them is no folder, or holds no run.
    """
    runs: dict[Path, None] = {}
    sweeps: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; name the folder of a run or of a sweep")
        below = [(path.resolve(), files) for path, files in _below(folder)]
        runs.update((path, None) for path, files in below if SUMMARY_FILE in files)
        sweeps.update((path, None) for path, files in below if JOBS_FILE in files)
        if not any({SUMMARY_FILE, JOBS_FILE} & set(files) for _, files in below):
            what = f"holds no run (a run is a folder with {SUMMARY_FILE})"
            raise ValueError(f"{folder}: {what}; name the folder of a run or of a sweep")
    common = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    found = [read_run(folder, name=_name(folder, common)) for folder in runs]
    found += [job for sweep in sweeps for job in _jobs(sweep, common, known=runs, complain=complain)]
    return sorted(found, key=lambda run: run.folder)


def _below(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    for path, subfolders, files in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in OWN_FOLDERS and not name.startswith(".")]
        yield Path(path), files


def _name(folder: Path, common: Path) -> str:
    return path_text(folder.relative_to(common)) if folder != common else path_text(Path(folder.name))


def _jobs(sweep: Path, common: Path, *, known: dict[Path, None], complain: Complain) -> Iterator[Run]:
    """Yield the jobs of a sweep whose runs were not found: those in folders that are not looked into, and no runs."""
    place = _name(sweep, common)
    for row in readable_list(sweep / JOBS_FILE, lambda problem: complain(f"{place}: {problem}")):
        job: dict[str, Any] = row if isinstance(row, dict) else {}
        folder = sweep / (str(job.get("below") or "") or Path(str(job.get("folder") or job.get("name"))).name)
        if "name" not in job or folder in known:
            continue
        if (folder / SUMMARY_FILE).is_file():
            yield read_run(folder, name=_name(folder, common))
        else:
            summary = {"status": job.get("status", "unknown"), "error": job.get("error")}
            axes = job["axes"] if isinstance(job.get("axes"), dict) else {}
            said = {str(key): str(value) for key, value in axes.items()}
            yield Run(_name(folder, common), folder, summary, {}, [], axes=said)
