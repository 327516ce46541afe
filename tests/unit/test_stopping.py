"""Signals to a process whose children are ranks: they may save, are killed when they are late, and start whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

SECONDS = 60

PROGRAM = textwrap.dedent("""
    import json, multiprocessing, os, signal, sys, time
    from pathlib import Path
    from rotexp.config.schema import Config
    from rotexp.launch.options import LaunchConfig
    from rotexp.launch.stopping import RankSignals, listen_as_rank
    from rotexp.process.signals import Interrupted, StopRequest, interruptible

    folder = Path(sys.argv[1])

    class Slow:
        '''Inputs of 1 MiB, that only a rank that was sent all of them has.'''
        def __reduce__(self):
            return unpickled, (bytes(2**20),)

    def unpickled(_data):
        return Slow()

    def rank(behavior, _inputs):
        try:
            with interruptible() as stop, stop.deferred():
                behave(behavior, stop)
        except Interrupted as interruption:
            os._exit(interruption.exit_code)

    def behave(behavior, stop):
        if behavior == "not listening":
            time.sleep(1000)
        listen_as_rank(folder)
        if behavior == "stuck":
            os.kill(os.getpid(), signal.SIGSTOP)
        while stop.signal is None:
            time.sleep(0.01)
        (folder / "saved").touch()
        raise Interrupted(stop.signal)

    def main(grace, *behaviors):
        stop = StopRequest()
        def killed(came):
            with (folder / "before_kill").open("a") as file:
                file.write(json.dumps(list(came)))
            time.sleep(0.5)  # as on a slow disk, longer than the time between two looks
        config = Config(launch=LaunchConfig(grace_seconds=float(grace)))
        signals = RankSignals(config, folder, folder, num_ranks=len(behaviors), stop=stop, before_kill=killed)
        ranks = [multiprocessing.get_context("spawn").Process(target=rank, args=(how, Slow())) for how in behaviors]
        with signals.passed_on():
            (folder / "started").touch()
            if not behaviors:
                time.sleep(1000)
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        found = {"came": signals.came, "late": signals.late, "early": signals.early, "stop": stop.signal}
        print(json.dumps(found | {"codes": [process.exitcode for process in ranks]}))

    if __name__ == "__main__":
        main(*sys.argv[2:])
""")


def children(pid: int) -> int:
    """Return how many children of a process are ranks (Linux)."""
    found = 0
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            found += command.exists() and b"spawn_main" in command.read_bytes()
    return found


def group_of(pid: int) -> list[psutil.Process]:
    """Return the processes of a group that still run."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., tuple[int, dict[str, object], str]]:
    """Start ranks of some behavior, signal once something is so, and return exit code, findings and errors."""
    file, folder = tmp_path / "program.py", tmp_path / "aside"
    file.write_text(PROGRAM)
    folder.mkdir()

    def run(
        *arguments: str, when: Callable[[int], bool], numbers: tuple[int, ...] = (signal.SIGTERM,), group: bool = False
    ) -> tuple[int, dict[str, object], str]:
        process = subprocess.Popen(
            [sys.executable, str(file), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            until = time.monotonic() + SECONDS
            while not when(process.pid):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < until
                time.sleep(0.001)
            for number in numbers:
                (os.killpg if group else os.kill)(process.pid, number)
            output, errors = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        _, alive = psutil.wait_procs(group_of(process.pid), timeout=SECONDS)
        assert not alive
        return process.returncode, json.loads(output or "{}"), errors

    return run


def listening(folder: Path, count: int) -> Callable[[int], bool]:
    return lambda _pid: len(list(folder.glob("*.listens"))) == count


def test_ranks_that_save_in_time_end_by_themselves(program: Callable[..., object], tmp_path: Path) -> None:
    found = program("60", "saving", "saving", when=listening(tmp_path / "aside", 2))
    number = signal.SIGTERM.value
    findings = {"came": [number], "late": False, "early": False, "stop": number, "codes": [143, 143]}
    assert found == (0, findings, "")
    assert (tmp_path / "aside" / "saved").exists()


def test_a_stopped_rank_is_killed_when_the_grace_has_run_out(program: Callable[..., object], tmp_path: Path) -> None:
    found = program("1", "saving", "stuck", when=listening(tmp_path / "aside", 2), numbers=(signal.SIGUSR1,))
    number = signal.SIGUSR1.value
    findings = {"came": [number], "late": True, "early": False, "stop": number, "codes": [143, -9]}
    assert found == (0, findings, "")
    assert json.loads((tmp_path / "aside" / "before_kill").read_text()) == [number]


def test_an_interrupt_from_the_keyboard_does_not_wait_for_the_grace(
    program: Callable[..., tuple[int, dict[str, object], str]], tmp_path: Path
) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    code, found, errors = program("1000", "stuck", when=listening(tmp_path / "aside", 1), numbers=numbers)
    assert (code, found["late"], found["codes"], errors) == (0, True, [-9], "")


def test_ranks_are_killed_at_once_while_one_has_not_begun(
    program: Callable[..., tuple[int, dict[str, object], str]], tmp_path: Path
) -> None:
    when = listening(tmp_path / "aside", 1)
    code, found, errors = program("1000", "saving", "not listening", when=lambda pid: when(pid) and children(pid) == 2)
    assert (code, found["early"], found["late"], found["codes"], errors) == (0, True, False, [-9, -9], "")
    assert not (tmp_path / "aside" / "saved").exists()


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("count", [1, 2])
def test_a_rank_that_is_being_started_is_sent_its_inputs_whole(
    program: Callable[..., tuple[int, dict[str, object], str]], count: int, number: int, group: bool
) -> None:
    """Cut short, it could not unpickle them, and said so; killed, it left the sender waiting for ever."""
    code, found, errors = program(
        "1000", "saving", "saving", when=lambda pid: children(pid) == count, numbers=(number,), group=group
    )
    assert (code, found["early"], found["came"], errors) == (0, True, [number], "")


def test_before_there_are_ranks_the_signal_is_an_exception(
    program: Callable[..., tuple[int, dict[str, object], str]], tmp_path: Path
) -> None:
    code, _, errors = program("1000", when=lambda _pid: (tmp_path / "aside" / "started").exists())
    assert code != 0
    assert errors.splitlines()[-1] == "rotexp.process.signals.Interrupted: interrupted by SIGTERM"
