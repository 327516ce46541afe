"""Jobs of a sweep run side by side in processes of their own; however each ends, it is recorded and the next starts.

Here a job is a small program; tests/cli/test_sweeps.py runs real ones.
"""

import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from damaged import damaged
from omegaconf import OmegaConf

from rotexp.config.composition import resolved_yaml
from rotexp.config.schema import COMPONENTS, Config
from rotexp.data.options import DataConfig, DataSource
from rotexp.files.folders import claimed
from rotexp.launch import beside
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.process.signals import Interrupted
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.options import RotationConfig
from rotexp.runfolder.records import write_summary
from rotexp.sweep import child
from rotexp.sweep.names import job_name
from rotexp.sweep.options import SweepConfig
from rotexp.sweep.outcome import Job, Outcome, Status, finished_before, left
from rotexp.sweep.scheduled import ask_for_requeue
from rotexp.sweep.sweep import JOBS_FILE, Sweep

PROGRAM = """
    #!{python}
    import json, os, signal, subprocess, sys, time
    from pathlib import Path
    import yaml

    entry, configs, name = sys.argv[3], sys.argv[5], sys.argv[7].removesuffix(".yaml")
    assert (sys.argv[1:3], "rotexp.train" in entry) == (["-P", "-c"], True)
    config = yaml.safe_load((Path(configs) / f"{{name}}.yaml").read_text())
    folder = Path(config["hydra"]["run"]["dir"])
    folder.mkdir(parents=True, exist_ok=True)

    def leave(**summary):
        (folder / "summary.json").write_text(json.dumps(summary))

    began = time.time()
    leave(status="running", error=None)
    {body}
    facts = {{"devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": config["launch"]["threads"]}}
    leave(status="done", error=None, evaluation={{"trained": {{"perplexity": 10.0 + config["seed"]}}}},
          facts=facts, began=began, ended=time.time())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let jobs be a program whose middle is `body`, which knows `config`, `folder` and `leave(status=…)`."""

    def install(body: str) -> None:
        file = tmp_path / "python"
        text = textwrap.dedent(PROGRAM).strip().format(python=sys.executable, body=textwrap.dedent(body).strip())
        file.write_text(text + "\n", encoding="utf-8")
        file.chmod(0o755)
        monkeypatch.setattr(beside.sys, "executable", str(file))

    return install


def make_jobs(folder: Path, seeds: list[int]) -> list[Job]:
    """Return jobs that differ in their seed."""
    config = Config(
        model=ModelConfig("tiny", ModelSource.tiny),
        data=DataConfig("builtin", DataSource.builtin),
        quant=QuantConfig("w4a4", weights=QuantSpec(bits=4)),
        rotation=RotationConfig("learned"),
        optimizer=COMPONENTS["optimizer"]["cayley_sgd"],
        objective=COMPONENTS["objective"]["ce"],
    )
    axes = [{"seed": str(seed)} for seed in seeds]
    return [
        Job(job_name(axis), axis, folder / job_name(axis), replace(config, seed=seed))
        for axis, seed in zip(axes, seeds, strict=True)
    ]


def run(folder: Path, seeds: list[int], **options: Any) -> Sweep:
    """Run jobs of those seeds."""
    sweep = Sweep()
    sweep.folder = folder
    sweep.run(make_jobs(folder, seeds), options=SweepConfig(**options))
    return sweep


def statuses(sweep: Sweep) -> dict[str, tuple[str, str | None]]:
    return {name: (outcome.status.value, outcome.error) for name, outcome in sweep.outcomes.items()}


FATES = {
    "leave(status='failed', error='rank 1: boom'); sys.exit(1)": ("failed", "rank 1: boom"),
    "leave(status='oom', error='out of memory'); sys.exit(1)": ("oom", "out of memory"),
    "sys.exit(3)": ("failed", "the process ended with exit code 3 before the run was done"),
    "sys.exit(0)": ("failed", "the process ended with exit code 0 before the run was done"),
    "os.kill(os.getpid(), signal.SIGKILL)": ("failed", "killed by SIGKILL"),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("failed", "killed by SIGSEGV"),
    "os.kill(os.getpid(), signal.SIGTERM)": ("interrupted", "killed by SIGTERM"),
    "1 / 0": ("failed", "the process ended with exit code 1 before the run was done"),
}


@pytest.mark.parametrize("fate", FATES)
def test_a_job_that_ends_badly_is_recorded_and_the_next_one_runs(
    fate: str, program: Callable[[str], None], tmp_path: Path
) -> None:
    program(f"if config['seed'] == 1: {fate}")
    sweep = run(tmp_path / "sweep", [0, 1, 2])
    assert statuses(sweep) == {"seed-0": ("done", None), "seed-1": FATES[fate], "seed-2": ("done", None)}
    assert sweep.outcomes["seed-2"].perplexity == sweep.outcomes["seed-2"].metric == 12.0
    assert sweep.exit_code == 1
    summary = json.loads((tmp_path / "sweep" / "seed-1" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == FATES[fate]
    rows = json.loads((tmp_path / "sweep" / JOBS_FILE).read_text())
    assert [(row["name"], row["axes"], row["status"]) for row in rows] == [
        ("seed-0", {"seed": "0"}, "done"),
        ("seed-1", {"seed": "1"}, FATES[fate][0]),
        ("seed-2", {"seed": "2"}, "done"),
    ]


def test_a_kill_while_the_system_lacks_memory_is_out_of_memory(
    program: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([4, 5])
    monkeypatch.setattr(child, "_kills_for_memory", lambda: next(kills))
    program("os.kill(os.getpid(), signal.SIGKILL)")
    assert statuses(run(tmp_path / "sweep", [0])) == {
        "seed-0": ("oom", "killed by SIGKILL (the system was out of memory)")
    }


def test_a_refused_job_keeps_its_reason_and_the_sweep_ends_with_2(
    program: Callable[[str], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refusal = "rotexp: seed=1: must be 2; change it"
    program(
        f"""
        if config['seed'] == 1:
                (folder / 'summary.json').unlink()
                folder.rmdir()
                os.write(2, b'a warning\\n{refusal}\\n')
                os._exit(2)
        """
    )
    sweep = run(tmp_path / "sweep", [0, 1, 2])
    assert statuses(sweep)["seed-1"] == ("refused", "seed=1: must be 2; change it")
    assert sweep.exit_code == 2
    assert not (tmp_path / "sweep" / "seed-1").exists()
    assert capfd.readouterr().err == f"a warning\n{refusal}\n"


def test_jobs_at_once_have_devices_of_their_own_and_write_to_their_folders(
    program: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    program("print('hello from', config['seed'], flush=True); time.sleep(1.0)")
    run(tmp_path / "sweep", [0, 1, 2, 3], jobs_at_once=2)
    folders = [tmp_path / "sweep" / f"seed-{seed}" for seed in range(4)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert {summary["facts"]["devices"] for summary in summaries} == {"4,5", "6,7"}
    assert {summary["facts"]["threads"] for summary in summaries} == {2}
    for one in summaries:
        for other in summaries:
            together = one["began"] < other["ended"] and other["began"] < one["ended"]
            assert one is other or not together or one["facts"]["devices"] != other["facts"]["devices"]
    assert summaries[0]["began"] < summaries[1]["ended"]
    assert summaries[1]["began"] < summaries[0]["ended"]
    assert (folders[3] / "job.log").read_text() == "hello from 3\n"
    output = capfd.readouterr().out
    assert "hello" not in output
    assert output.count("starts (output in ") == output.count("is done after") == 4


def test_a_job_alone_sees_what_the_sweep_sees(
    program: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    program("print('hello', flush=True)")
    run(tmp_path / "sweep", [0])
    facts = json.loads((tmp_path / "sweep" / "seed-0" / "summary.json").read_text())["facts"]
    assert facts == {"devices": "4,5,6,7", "threads": None}
    assert "hello\n" in capfd.readouterr().out
    assert not (tmp_path / "sweep" / "seed-0" / "job.log").exists()


def test_the_first_failure_ends_the_sweep_where_that_is_asked_for(
    program: Callable[[str], None], tmp_path: Path
) -> None:
    program("if config['seed'] == 1: sys.exit(3)")
    sweep = Sweep()
    sweep.folder = tmp_path / "sweep"
    jobs = make_jobs(sweep.folder, [0, 1, 2])
    for job in jobs:
        sweep.expect(job.name, job.axes)
    sweep.run(jobs, options=SweepConfig(fail_fast=True))
    assert [status for status, _ in statuses(sweep).values()] == ["done", "failed", "not started"]
    assert sweep.exit_code == 1
    assert not (sweep.folder / "seed-2").exists()
    sweep.run(jobs[2:], options=SweepConfig(fail_fast=True))
    assert sweep.outcomes["seed-2"].status is Status.not_started, "a sweeper that goes on starts nothing more"


def leave_done(job: Job, config: Config) -> None:
    job.folder.mkdir(parents=True)
    (job.folder / "config.resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    (job.folder / "rotations.safetensors").touch()
    figures = {"evaluation": {"trained": {"perplexity": 7.0, "kl": 0.5}}, "time": {"load": 1.0, "train": 2.0}}
    write_summary(job.folder, {"status": "done", "error": None, **figures})


def test_jobs_that_are_done_are_not_run_again(program: Callable[[str], None], tmp_path: Path) -> None:
    program("sys.exit(3)")
    first, _ = make_jobs(tmp_path / "sweep", [0, 1])
    launched_otherwise = replace(
        first.config,
        launch=replace(first.config.launch, threads=7),
        sweep=SweepConfig(jobs_at_once=3),
        tracker=replace(first.config.tracker, group="other"),
    )
    leave_done(first, launched_otherwise)
    sweep = run(tmp_path / "sweep", [0, 1], optimized_metric="evaluation.trained.kl")
    outcome = sweep.outcomes["seed-0"]
    assert (outcome.status, outcome.before, outcome.perplexity, outcome.seconds) == (Status.done, True, 7.0, 3.0)
    assert outcome.metric == 7.0
    assert sweep.outcomes["seed-1"].status is Status.failed
    measured = replace(first, config=replace(first.config, sweep=SweepConfig(optimized_metric="evaluation.trained.kl")))
    assert finished_before(measured).metric == 0.5  # type: ignore[union-attr]


def test_a_done_job_whose_configuration_is_damaged_is_named_by_its_folder(
    program: Callable[[str], None], tmp_path: Path
) -> None:
    program("sys.exit(3)")
    job = make_jobs(tmp_path / "sweep", [0])[0]
    leave_done(job, job.config)
    (job.folder / "config.resolved.yaml").write_text("a: [")
    outcome = run(tmp_path / "sweep", [0]).outcomes["seed-0"]
    assert outcome.status is Status.refused
    assert str(outcome.error).startswith(f"{job.folder}: config.resolved.yaml is not the configuration of a run (")


def test_a_folder_with_another_run_is_not_taken_for_this_one(program: Callable[[str], None], tmp_path: Path) -> None:
    program("sys.exit(3)")
    job = make_jobs(tmp_path / "sweep", [0])[0]
    leave_done(job, replace(job.config, train=replace(job.config.train, steps=7), seed=5))
    before = (job.folder / "summary.json").read_bytes()
    sweep = run(tmp_path / "sweep", [0])
    assert sweep.exit_code == 2
    assert "seed-0 is done with another seed, train.steps; choose another folder" in str(sweep.outcomes["seed-0"].error)
    assert (job.folder / "summary.json").read_bytes() == before


@damaged
def test_a_damaged_summary_of_a_job_is_named_and_the_job_is_not_taken_for_done(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    (job,) = make_jobs(tmp_path, [0])
    leave_done(job, job.config)
    assert finished_before(job) is not None
    (job.folder / "summary.json").write_bytes(content)
    assert finished_before(job) is None  # so its own process is started, which says so
    outcome = left(job)
    error = f"{job.folder}/summary.json: cannot be read ({reason}); restore it"
    assert (outcome.status, outcome.error) == (Status.failed, error)


@pytest.mark.parametrize("change", [{"time": 3}, {"time": {"load": "x"}}, {"evaluation": []}, {"error": {"a": 1}}])
def test_odd_values_of_a_summary_do_not_end_a_sweep(change: dict[str, Any], tmp_path: Path) -> None:
    (job,) = make_jobs(tmp_path, [0])
    leave_done(job, job.config)
    write_summary(job.folder, json.loads((job.folder / "summary.json").read_text()) | change)
    assert left(job).status is Status.done


def test_what_a_run_resolved_of_its_model_is_no_difference(tmp_path: Path) -> None:
    job = make_jobs(tmp_path, [0])[0]
    asked = ModelConfig("hf", ModelSource.hf, path="org/name", revision="main")
    leave_done(job, replace(job.config, model=replace(asked, revision="a" * 40)))
    for revision, same in {"main": True, None: True, "a" * 40: True, "b" * 40: False}.items():
        again = replace(job, config=replace(job.config, model=replace(asked, revision=revision)))
        if same:
            assert finished_before(again) is not None
        else:
            with pytest.raises(ValueError, match=r"is done with another model\.revision"):
                finished_before(again)


def test_a_second_sweep_in_the_same_folder_is_refused(program: Callable[[str], None], tmp_path: Path) -> None:
    program("pass")
    with (
        claimed(tmp_path / "sweep", key="hydra.sweep.dir"),
        pytest.raises(ValueError, match=r"hydra\.sweep\.dir=.*: another process runs in it"),
    ):
        run(tmp_path / "sweep", [0])
    assert run(tmp_path / "sweep", [0]).exit_code == 0


def signal_later(*numbers: int, when: Callable[[], bool]) -> threading.Thread:
    """Send signals to this process, one after the other, once something is so."""

    def send() -> None:
        while not when():
            time.sleep(0.05)
        for number in numbers:
            time.sleep(0.3)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture
def left_behind() -> Callable[[], set[psutil.Process]]:
    """Return this process's children that it did not have before the test; other tests keep some."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: set(psutil.Process().children(recursive=True)) - before


SAVING = """
def save(*_):
        time.sleep(0.5)
        leave(status='interrupted', error='interrupted by SIGTERM', saved=True)
        sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / 'ready').touch()
time.sleep(100)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_signal_lets_running_jobs_save_and_starts_no_more(
    number: signal.Signals,
    code: int,
    program: Callable[[str], None],
    left_behind: Callable[[], set[psutil.Process]],
    tmp_path: Path,
) -> None:
    program(SAVING)
    folder = tmp_path / "sweep"
    sweep = Sweep()
    sweep.folder = folder
    jobs = make_jobs(folder, [0, 1, 2])
    for job in jobs:
        sweep.expect(job.name, job.axes)
    sender = signal_later(number, when=lambda: all((folder / f"seed-{seed}" / "ready").exists() for seed in (0, 1)))
    with pytest.raises(Interrupted) as interruption:
        sweep.run(jobs, options=SweepConfig(jobs_at_once=2))
    sender.join()
    assert interruption.value.exit_code == code
    assert [status for status, _ in statuses(sweep).values()] == ["interrupted", "interrupted", "not started"]
    assert json.loads((folder / "seed-1" / "summary.json").read_text())["saved"] is True
    assert left_behind() == set()


def test_a_second_signal_ends_jobs_that_do_not_listen(
    program: Callable[[str], None], left_behind: Callable[[], set[psutil.Process]], tmp_path: Path
) -> None:
    program("signal.signal(signal.SIGTERM, signal.SIG_IGN); (folder / 'ready').touch(); time.sleep(100)")
    folder = tmp_path / "sweep"
    sender = signal_later(signal.SIGINT, signal.SIGINT, when=(folder / "seed-0" / "ready").exists)
    sweep = Sweep()
    sweep.folder = folder
    with pytest.raises(Interrupted):
        sweep.run(make_jobs(folder, [0]), options=SweepConfig())
    sender.join()
    assert statuses(sweep) == {"seed-0": ("interrupted", "killed by SIGKILL")}
    assert left_behind() == set()


def test_processes_that_a_job_leaves_behind_are_ended(program: Callable[[str], None], tmp_path: Path) -> None:
    program("left = subprocess.Popen(['sleep', '100']); (folder / 'left').write_text(str(left.pid)); sys.exit(3)")
    sweep = run(tmp_path / "sweep", [0])
    assert sweep.outcomes["seed-0"].status is Status.failed
    number = int((tmp_path / "sweep" / "seed-0" / "left").read_text())
    _, alive = psutil.wait_procs([psutil.Process(number)] if psutil.pid_exists(number) else [], timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_jobs_configuration_is_the_resolved_one_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a ${b} = {c}, d"
    text = beside.runnable(make_jobs(tmp_path, [3])[0].config, folder)
    written = OmegaConf.create(text)
    assert (written.seed, written.train.steps) == (3, 80)
    assert written.hydra.run.dir == str(folder)
    assert text.startswith(resolved_yaml(make_jobs(tmp_path, [3])[0].config))


def test_the_table_shows_what_is_varied_and_every_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = Sweep()
    sweep.folder = tmp_path
    sweep.expect("a", {"x": "[1,2]", "y": "1"})
    sweep.record(Outcome("a", {"x": "[1,2]", "y": "1"}, tmp_path / "a", Status.done, None, 12.3, 45.6789))
    sweep.refuse("b", {"x": "[red]", "y": "2"}, "x=[red]: must be\n  a number; change it")
    sweep.expect("c", {"x": "3", "y": "3"})
    sweep.show(command=["…/train.py", "-m", "x=[1,2],3", "hydra.sweep.dir=elsewhere"])
    shown = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.out.splitlines() if "│" in line]
    assert rows == [
        ["[1,2]", "1", "done", "45.68", "12", "a", ""],
        ["[red]", "2", "refused", "", "", "", "x=[red]: must be a number; change it"],
        ["3", "3", "not started", "", "", "", ""],
    ]
    again = f"to go on: python -m rotexp.train -m 'x=[1,2],3' hydra.sweep.dir={tmp_path}"
    assert shown.out.splitlines()[-2:] == [f"sweep folder: {tmp_path} (1 of 3 jobs done)", again]
    assert shown.err == "rotexp: x=[red]: must be a number; change it\n"


def test_a_sweep_in_which_no_job_is_right_has_no_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = Sweep()
    sweep.folder = tmp_path
    sweep.refuse("a", {}, "wrong")
    sweep.show(command=["train.py"])
    assert capsys.readouterr().out == ""


def test_an_interrupted_job_asks_submitit_alone_for_its_place_in_the_queue() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: received.append(number))
    try:
        ask_for_requeue({})
        ask_for_requeue({"SUBMITIT_EXECUTOR": "local"})
        assert received == []
        ask_for_requeue({"SUBMITIT_EXECUTOR": "slurm"})
        assert received == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_what_a_scheduler_ran_is_read_from_its_folder(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, [0, 1, 2])
    leave_done(jobs[0], jobs[0].config)
    jobs[1].folder.mkdir()
    write_summary(jobs[1].folder, {"status": "running", "error": None})
    sweep = Sweep()
    sweep.folder = tmp_path
    sweep.read(jobs)
    assert [(outcome.status, outcome.perplexity) for outcome in sweep.outcomes.values()] == [
        (Status.done, 7.0),
        (Status.failed, None),
        (Status.failed, None),
    ]
    assert "see the scheduler's log" in str(sweep.outcomes["seed-1"].error)
