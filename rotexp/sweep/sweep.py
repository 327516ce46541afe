"""Runs the jobs of a sweep, so many at once, and keeps how each ended."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rotexp.files.folders import claimed, make_folder, write_atomically
from rotexp.process.saying import tell
from rotexp.process.signals import SAVING, Interrupted
from rotexp.runfolder.layout import JOB_LOG_FILE, JOBS_FILE
from rotexp.runfolder.records import finite
from rotexp.sweep.child import Child
from rotexp.sweep.devices import VISIBLE, shares, visible_accelerators, with_share_of_threads
from rotexp.sweep.options import SweepConfig
from rotexp.sweep.outcome import Job, Outcome, Status, ended, finished_before, left
from rotexp.sweep.table import show

SECONDS_AFTER_GRACE = 60.0
"""How long interrupted jobs may take to end beyond `launch.grace_seconds`, in which they save."""

LISTEN_SECONDS = 0.1


class Sweep:
    """The jobs of one sweep, over as many calls as its sweeper makes, and the outcome of each by its name."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.stopped = False

    @property
    def exit_code(self) -> int:
        """0 if every job is done, 2 if one was refused, else 1."""
        return max((outcome.exit_code for outcome in self.outcomes.values()), default=0)

    def show(self, *, command: Sequence[str]) -> None:
        """Print the table of all jobs, unless none could be composed, and how to go on where one is not done.

        Args:
            command: the one that started the sweep.
        """
        outcomes = list(self.outcomes.values())
        if self.folder is not None and any(outcome.composed for outcome in outcomes):
            left_over = any(outcome.status not in (Status.done, Status.refused) for outcome in outcomes)
            show(outcomes, folder=self.folder, again=again(command, self.folder) if left_over else None)

    def record(self, outcome: Outcome) -> None:
        """Keep an outcome, also in the sweep's folder."""
        assert self.folder is not None
        self.outcomes[outcome.name] = outcome
        rows = [entry.record(self.folder) for entry in self.outcomes.values()]
        make_folder(self.folder, key="hydra.sweep.dir")
        write_atomically(self.folder / JOBS_FILE, json.dumps(finite(rows), indent=2, allow_nan=False) + "\n")

    def expect(self, name: str, axes: Mapping[str, str]) -> None:
        """Give a job its place among the others."""
        self.outcomes[name] = Outcome(name, axes, None, Status.not_started)

    def refuse(self, name: str, axes: Mapping[str, str], reason: str) -> None:
        """Record a job that is wrong, and tell people."""
        line = " ".join(reason.split())
        tell(line)
        self.record(Outcome(name, axes, None, Status.refused, line))

    def read(self, jobs: Iterable[Job]) -> None:
        """Record the outcomes of jobs that somebody else ran."""
        for job in jobs:
            self.record(left(job))

    def run(self, jobs: Sequence[Job], *, options: SweepConfig) -> None:
        """Run the jobs that are not done yet, and record the outcome of each.

        Raises:
            ValueError: another sweep runs in the folder, or there are more jobs at once than accelerators.
            Interrupted: a signal came; every job that ran was ended.
        """
        assert self.folder is not None
        slots = shares(visible_accelerators(), jobs_at_once=options.jobs_at_once)
        with (
            claimed(self.folder, key="hydra.sweep.dir"),
            tempfile.TemporaryDirectory(prefix="rotexp-sweep-") as configs,
        ):
            with noted_signals() as signals:
                _Round(self, jobs, slots=slots, options=options, configs=Path(configs), signals=signals).run()
            if signals:
                raise Interrupted(signals[0])


class _Round:
    """One call's jobs: those that wait, and those that run, by their slot."""

    def __init__(
        self,
        sweep: Sweep,
        jobs: Sequence[Job],
        *,
        slots: Sequence[tuple[str, ...]],
        options: SweepConfig,
        configs: Path,
        signals: Sequence[int],
    ) -> None:
        self.sweep, self.slots, self.options, self.configs, self.signals = sweep, slots, options, configs, signals
        self.waiting = deque(jobs)
        self.running: dict[int, Child] = {}

    def run(self) -> None:
        """Run all jobs, or until a signal comes, or one fails and that is to end the sweep."""
        try:
            while self.running or (self.waiting and not self.sweep.stopped):
                self.fill()
                self.collect()
                if self.signals:
                    self.interrupt()
                    return
        finally:
            for child in self.running.values():
                child.close()

    def fill(self) -> None:
        """Start jobs in free slots."""
        for slot in range(len(self.slots)):
            while self.waiting and slot not in self.running and not (self.sweep.stopped or self.signals):
                self.begin(self.waiting.popleft(), slot)

    def begin(self, job: Job, slot: int) -> None:
        """Start a job, unless there is nothing to do, or it may not be done."""
        try:
            before = finished_before(job)
        except ValueError as error:
            before = Outcome(job.name, job.axes, job.folder, Status.refused, str(error))
        if before is not None:
            self.end(before)
            return
        several, share = len(self.slots) > 1, self.slots[slot]
        config = with_share_of_threads(job.config, accelerators=len(share), jobs_at_once=len(self.slots))
        config = replace(config, sweep=SweepConfig())
        say(f"job {job.name} starts" + (f" (output in {job.folder / JOB_LOG_FILE})" if several else ""))
        variables = {VISIBLE: ",".join(share)} if several and share else {}
        self.running[slot] = Child(job, config, self.configs, variables=variables, log=several)

    def collect(self) -> None:
        """Pass on what the running jobs say, and record those that have ended."""
        for slot, child in list(self.running.items()):
            child.listen(seconds=LISTEN_SECONDS)
            ending = child.ending()
            if ending is not None:
                child.close()
                del self.running[slot]
                self.end(ended(child.job, ending, interrupted=bool(self.signals)))

    def end(self, outcome: Outcome) -> None:
        """Record an outcome, and stop where the first failure is to end the sweep."""
        self.sweep.record(outcome)
        error = f": {outcome.error}" if outcome.error else ""
        before = " before" if outcome.before else f" after {outcome.seconds:.0f} s" if outcome.seconds else ""
        say(f"job {outcome.name} is {outcome.status.value}{before}{error}")
        self.sweep.stopped |= self.options.fail_fast and outcome.status is not Status.done

    def interrupt(self) -> None:
        """Let the running jobs save what they have; a second signal ends them at once."""
        for child in self.running.values():
            child.interrupt()
        graces = (child.job.config.launch.grace_seconds for child in self.running.values())
        until = time.monotonic() + max(graces, default=0.0) + SECONDS_AFTER_GRACE
        while self.running and len(self.signals) < 2 and time.monotonic() < until:
            self.collect()
        for child in self.running.values():
            child.kill()
        self.collect()


def again(command: Sequence[str], folder: Path) -> str:
    """Return the command line that goes on with a sweep."""
    given = [argument for argument in command[1:] if not argument.startswith("hydra.sweep.dir=")]
    return shlex.join(["python", "-m", "rotexp.train", *given, f"hydra.sweep.dir={folder}"])


def say(line: str) -> None:
    """Tell people what happens, one line each."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yield a list to which the signals that end a run are added inside the block, and that nothing else does."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: noted.append(number))
        for number in (signal.SIGINT, *SAVING)
    }
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
