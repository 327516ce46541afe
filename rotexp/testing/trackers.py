"""Check that a tracker of one's own takes what a run gives it, and leaves the run as it is."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rotexp.runfolder.layout import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from rotexp.runfolder.records import MetricsFile
from rotexp.tracking.tracker import TrackedRun, Tracker

PLAIN_CONFIG = {"seed": 0, "model": {"name": "tiny", "path": None}, "tracker": {"tags": ["a"]}, "profile": False}
ROWS: tuple[tuple[int, dict[str, float]], ...] = (
    (0, {"time/load_s": 0.25}),
    (0, {"eval/quantized/perplexity": 31.5, "eval/quantized/kl": math.inf}),
    (1, {"train/loss": 3.25, "train/tokens": 2048.0, "memory/peak_rss_gib_max": 0.5}),
    (2, {"train/loss": math.nan, "train/tokens": 4096.0, "grad_norm/total": -math.inf}),
    (2, {"time/train_s": 1.5}),
)
"""A short run: phases before the first step, numbers that are not finite, several rows at one step."""
RESUMED_AT = 1
SUMMARY = {
    "status": "done",
    "error": None,
    "evaluation": {"quantized": {"perplexity": 31.5, "kl": math.inf}},
    "rotations": [{"name": "R1", "drift": math.nan}],
}


def check_tracker(cls: Callable[..., Tracker], **options: Any) -> None:
    """Let a tracker record a run, the same resumed, and one that fails, each in a folder of its own that is removed.

    Args:
        cls: called as `cls(run, **options)`, see `rotexp.tracking.tracker.Tracker`.

    Raises:
        AssertionError: it raises something, changes what it is given, a file of rotexp's or the process, leaves a
            thread that a run would wait for, or does not keep what it calls the run.
    """
    with TemporaryDirectory() as place:
        folder = _run_folder(Path(place))
        run_id = _record(cls, TrackedRun(folder, PLAIN_CONFIG), options, rows=ROWS, exit_code=1)
        resumed = TrackedRun(folder, PLAIN_CONFIG, step=RESUMED_AT, logged_to=ROWS[-1][0], run_id=run_id)
        rows = tuple(row for row in ROWS if row[0] > RESUMED_AT)
        again = _record(cls, resumed, options, rows=rows, exit_code=0)
        assert again == run_id, f"run_id: was {run_id!r} and is {again!r} after resuming; go on with run.run_id"
    with TemporaryDirectory() as place:
        _record(cls, TrackedRun(_run_folder(Path(place)), PLAIN_CONFIG), options, rows=(), exit_code=1)


def _run_folder(folder: Path) -> Path:
    """Return a folder as a run has it: with the rows up to where it may be resumed."""
    (folder / CONFIG_FILE).write_text("seed: 0\n")
    (folder / SUMMARY_FILE).write_text('{"status": "running"}\n')
    metrics = MetricsFile(folder)
    for step, row in ROWS:
        if step <= RESUMED_AT:
            metrics.log(row, step=step)
    metrics.finish({}, exit_code=0)
    return folder


def _record(
    cls: Callable[..., Tracker],
    run: TrackedRun,
    options: Mapping[str, Any],
    *,
    rows: tuple[tuple[int, Mapping[str, float]], ...],
    exit_code: int,
) -> str | None:
    """Record rows and an end; return what the tracker calls the run."""
    with _process_unchanged(), _files_unchanged(run.folder), _unchanged("plain_config", run.plain_config):
        with _no_error("opening it"):
            tracker = cls(run, **options)
        for step, row in rows:
            with _unchanged("row", row), _no_error(f"log({dict(row)}, step={step})"):
                tracker.log(row, step=step)
        run_id = getattr(tracker, "run_id", None)
        assert run_id is None or isinstance(run_id, str), f"run_id={run_id!r}: must be a text or None"
        summary = SUMMARY if exit_code == 0 else {"status": "failed", "error": "out of paper"}
        with _unchanged("summary", summary), _no_error(f"finish(…, exit_code={exit_code})"):
            tracker.finish(summary, exit_code=exit_code)
    return run_id


@contextmanager
def _no_error(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: raised {type(error).__name__}: {error}") from error


@contextmanager
def _unchanged(what: str, given: Any) -> Iterator[None]:
    before = repr(copy.deepcopy(given))  # of nan too, which equals nothing
    yield
    assert repr(given) == before, f"{what}: was changed, and others are given it too; change a copy"


@contextmanager
def _files_unchanged(folder: Path) -> Iterator[None]:
    names = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)
    before = {name: (folder / name).read_bytes() for name in names}
    yield
    for name in names:
        found = (folder / name).read_bytes() if (folder / name).is_file() else None
        assert found == before[name], f"{name}: was changed; write files of other names into run.folder"


@contextmanager
def _process_unchanged() -> Iterator[None]:
    """Refuse what would change rank 0 alone, or keep its process from ending."""
    folder, threads, states = Path.cwd(), {*threading.enumerate()}, _random_states()
    yield
    assert Path.cwd() == folder, "the working folder was changed; use run.folder"
    assert _random_states() == states, "random numbers were drawn from a global generator; use one of its own"
    left = [thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    assert not left, f"threads {', '.join(left)} are left after finish, and the run would not end; join them"


def _random_states() -> tuple[object, ...]:
    numpy = np.random.get_state(legacy=False)
    return random.getstate(), repr(numpy["state"]), torch.get_rng_state().numpy().tobytes()
