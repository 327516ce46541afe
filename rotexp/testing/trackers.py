"""Check that a tracker of one's own takes what a run gives it, and leaves the run as it is."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rotexp.config.components import Component
from rotexp.config.composition import to_plain
from rotexp.config.schema import Config
from rotexp.data.options import DataConfig, DataSource
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.optim.options import CayleySGDConfig
from rotexp.quant.options import QuantConfig
from rotexp.rotation.options import RotationConfig
from rotexp.runfolder.layout import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from rotexp.runfolder.records import MetricsFile
from rotexp.testing.rules import rule
from rotexp.tracking.options import TrackerConfig
from rotexp.tracking.tracker import TrackedRun, Tracker

CONFIG = Config(
    model=ModelConfig("tiny", ModelSource.tiny),
    data=DataConfig("builtin", DataSource.builtin),
    quant=QuantConfig("w4a4"),
    rotation=RotationConfig("learned"),
    optimizer=CayleySGDConfig(),
    objective=Component("ce", "rotexp.training.objectives.CrossEntropy"),
    tracker=TrackerConfig(tags=["a"]),
)
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


ReadBack = Callable[[Path], Iterable[tuple[int, Mapping[str, float]]]]
"""Returns the step and the metrics of every row that a tracker kept of the run of a folder, in any order."""


def check_tracker(cls: Callable[..., Tracker], *, read_back: ReadBack | None = None, **options: Any) -> None:
    """Let a tracker record a run, the same resumed, and one that fails, each in a folder of its own that is removed.

    Where a tracker keeps rows is its own affair: that none is lost is checked only where `read_back` is given.

    Args:
        cls: called as `cls(run, **options)`, see `rotexp.tracking.tracker.Tracker`.
        read_back: reads what it kept, called once the run has ended, and again once the resumed one has.

    Raises:
        AssertionError: it raises something, changes what it is given, a file of rotexp's or the process, leaves a
            thread that a run would wait for, does not keep what it calls the run, or lost a number.
    """
    plain = to_plain(CONFIG)
    with TemporaryDirectory() as place:
        folder = _run_folder(Path(place))
        run_id = _record(cls, TrackedRun(folder, plain), options, rows=ROWS, exit_code=1)
        _check_kept(folder, read_back)
        resumed = TrackedRun(folder, plain, step=RESUMED_AT, logged_to=ROWS[-1][0], run_id=run_id)
        rows = tuple(row for row in ROWS if row[0] > RESUMED_AT)
        again = _record(cls, resumed, options, rows=rows, exit_code=0)
        assert again == run_id, f"run_id: was {run_id!r} and is {again!r} after resuming; go on with run.run_id"
        _check_kept(folder, read_back)
    with TemporaryDirectory() as place:
        _record(cls, TrackedRun(_run_folder(Path(place)), plain), options, rows=(), exit_code=1)


def _check_kept(folder: Path, read_back: ReadBack | None) -> None:
    """Check that every number of every row was kept, those of a session that is gone on from too."""
    if read_back is None:
        return
    with rule("read_back(folder)"):
        kept = {(step, key, repr(float(value))) for step, row in read_back(folder) for key, value in row.items()}
    for step, row in ROWS:
        lost = [f"{key}={value}" for key, value in row.items() if (step, key, repr(value)) not in kept]
        assert not lost, f"log: {', '.join(lost)} of step {step} was not kept"


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
        with rule("opening it"):
            tracker = cls(run, **options)
        for step, row in rows:
            given = dict(row)
            with _unchanged("row", given), rule(f"log({row}, step={step})"):
                tracker.log(given, step=step)
        run_id = getattr(tracker, "run_id", None)
        assert run_id is None or isinstance(run_id, str), f"run_id={run_id!r}: must be a text or None"
        summary = copy.deepcopy(SUMMARY) if exit_code == 0 else {"status": "failed", "error": "out of paper"}
        with _unchanged("summary", summary), rule(f"finish(…, exit_code={exit_code})"):
            tracker.finish(summary, exit_code=exit_code)
    return run_id


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
