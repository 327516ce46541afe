"""A checkpoint is complete or absent, whatever ends the run that writes it, and the newest complete one is found."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged import RUN_FACTS
from torch import Tensor

from rotexp.process.signals import Interrupted, StopRequest, interruptible
from rotexp.runfolder import checkpoint_folders
from rotexp.runfolder.checkpoint_folders import FACTS, LATEST, find_checkpoint, read_facts
from rotexp.sharding.communication import Communication
from rotexp.sharding.split_vector import SplitVector
from rotexp.training import saved_state
from rotexp.training.saved_state import Checkpoints, load, restore_random_states

ROOT = Path(__file__).parents[2]


def tensors(value: float, *, size: int = 37) -> dict[str, Tensor | SplitVector]:
    return {
        "rotation": torch.full((5, 5), value, dtype=torch.float64),
        "weight": torch.full((size, 3), value, dtype=torch.bfloat16),
        "step": torch.tensor(int(value)),
        "master": SplitVector(7, [0, 3], [torch.full((3,), value), torch.full((4,), value)]),
    }


def opened(folder: Path, *, keep: int = 2, asynchronous: bool = False) -> Checkpoints:
    return Checkpoints(folder, keep=keep, asynchronous=asynchronous, communication=Communication())


def saved(folder: Path, *steps: int, keep: int = 9) -> list[Path]:
    checkpoints = opened(folder, keep=keep)
    return [checkpoints.save(step, tensors(step), facts=RUN_FACTS) for step in steps]


def read(path: Path, **options: int) -> dict[str, Tensor | SplitVector]:
    state = tensors(0, **options)
    load(path, state, communication=Communication())
    return state


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_names_no_module_of_ours_so_that_moved_code_still_reads_it(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    files = [file for file in path.iterdir() if file.name != FACTS]
    assert any(file.name == ".metadata" for file in files)
    assert [file.name for file in files if b"rotexp" in file.read_bytes()] == []


def test_what_is_saved_is_loaded_in_place_bit_for_bit(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(37, 3),
        "b": torch.randn(4).bfloat16(),
        "c": torch.tensor(True),
        "d": torch.nn.Parameter(torch.randn(3, 3, 3)),
        "e/f g": torch.randn(2, 5).T,
    }
    state["a"][0, 0] = -0.0
    path = opened(tmp_path).save(12, state, facts={"losses": [1.5, float("nan")], "id": "x"})
    assert path == tmp_path / "checkpoints" / "step-00000012"
    into = {name: torch.nn.Parameter(torch.zeros_like(tensor), tensor.requires_grad) for name, tensor in state.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
    facts = load(path, into, communication=Communication())
    assert facts["id"] == "x"
    assert facts["losses"][0] == 1.5
    assert np.isnan(facts["losses"][1])
    for name, tensor in state.items():
        assert torch.equal(
            into[name].view(torch.uint8) if name == "a" else into[name],
            tensor.view(torch.uint8) if name == "a" else tensor,
        )
        assert into[name].data_ptr() == addresses[name]
    assert read_facts(path)["step"] == 12
    assert read_facts(path)["world_size"] == 1


def test_the_pointer_and_the_search_name_the_newest(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path).path is None
    paths = saved(tmp_path, 3, 10)
    assert (tmp_path / "checkpoints" / LATEST).read_text().strip() == "step-00000010"
    found = find_checkpoint(tmp_path)
    assert (found.path, found.skipped) == (paths[1], [])
    assert find_checkpoint(paths[0]).path == paths[0], "one checkpoint may be named itself"
    assert listed(tmp_path) == [LATEST, "step-00000003", "step-00000010"]


def test_finding_needs_no_torch(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    code = (
        "import sys; from pathlib import Path; from rotexp.runfolder.checkpoint_folders import find_checkpoint;"
        f"print(find_checkpoint(Path({str(tmp_path)!r})).path, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert run.stdout.split() == [str(path), "False"]


def truncate(path: Path) -> str:
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 10)
    return "__0_0.distcp is truncated"


def flip(path: Path) -> str:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "__0_0.distcp was changed"


def lose(path: Path) -> str:
    (path / ".metadata").unlink()
    return ".metadata is missing"


def age(path: Path) -> str:
    facts = json.loads((path / FACTS).read_text())
    (path / FACTS).write_text(json.dumps(facts | {"format": 99}))
    return "its format is 99, and this version reads 2"


def garble(path: Path) -> str:
    (path / FACTS).write_text((path / FACTS).read_text()[:50])
    return "facts.json cannot be read"


def empty(path: Path) -> str:
    shutil.rmtree(path)
    path.mkdir()
    return "it holds no facts.json"


def replace(path: Path) -> str:
    (path / FACTS).write_text('{"model_type": "llama"}')
    return "is not that of a checkpoint of rotexp"


def confuse(path: Path) -> str:
    facts = json.loads((path / FACTS).read_text())
    (path / FACTS).write_text(json.dumps(facts | {"files": {"__0_0.distcp": 3}}))
    return "is not that of a checkpoint of rotexp"


@pytest.mark.parametrize("spoil", [truncate, flip, lose, age, garble, empty, replace, confuse])
def test_a_spoiled_checkpoint_is_skipped_by_name_and_refused_when_it_is_asked_for(tmp_path: Path, spoil) -> None:
    good, bad = saved(tmp_path, 1, 2)
    fault = spoil(bad)
    found = find_checkpoint(tmp_path)
    assert found.path == good
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith(str(bad))
    assert fault in found.skipped[0]
    assert find_checkpoint(bad).path is None
    assert fault in find_checkpoint(bad).skipped[0]
    state = tensors(5)
    with pytest.raises(ValueError, match=r"resume=.*step-00000002") as raised:
        load(bad, state, communication=Communication())
    assert fault in str(raised.value)
    assert "\n" not in str(raised.value)
    assert (state["weight"] == 5).all(), "nothing was written"


def test_a_metadata_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    (path / ".metadata").write_bytes(b"not a pickle")
    facts = json.loads((path / FACTS).read_text())
    facts["files"][".metadata"] = checkpoint_folders._entry(path / ".metadata")
    (path / FACTS).write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="resume=") as raised:
        load(path, tensors(0), communication=Communication())
    assert "\n" not in str(raised.value)


def test_a_checkpoint_of_another_model_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    state = tensors(0, size=38)
    state["more"] = state.pop("rotation")
    with pytest.raises(ValueError, match="resume=") as raised:
        load(path, state, communication=Communication())
    for fault in (
        "more is missing",
        "rotation is unexpected",
        "weight is [37, 3] bfloat16 instead of [38, 3] bfloat16",
    ):
        assert fault in str(raised.value)
    assert (state["step"] == 0).all()


def test_retention_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, tensors(step), facts=RUN_FACTS)
        assert len([name for name in listed(tmp_path) if name.startswith("step")]) == min(step, 2)
    assert listed(tmp_path) == [LATEST, "step-00000003", "step-00000004"]


def test_retention_counts_no_broken_checkpoint_and_never_removes_the_last_complete_one(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    good, *bad = saved(tmp_path, 2, 3, 4)
    for path in bad:
        truncate(path)
    assert find_checkpoint(tmp_path).path == good
    checkpoints = opened(tmp_path, keep=2)
    checkpoints.save(5, tensors(5), facts=RUN_FACTS)
    assert listed(tmp_path) == [LATEST, *(f"step-0000000{step}" for step in (2, 3, 4, 5))]
    opened(tmp_path, keep=1).save(6, tensors(6), facts=RUN_FACTS)
    assert listed(tmp_path) == [LATEST, "step-00000006"]


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(1, tensors(1), facts=RUN_FACTS)
    path = checkpoints.save(1, tensors(7), facts=RUN_FACTS)
    assert (read(path)["weight"] == 7).all()
    assert listed(tmp_path) == [LATEST, "step-00000001"]


def test_a_run_that_went_back_forgets_the_steps_ahead(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6)
    path = opened(tmp_path).save(3, tensors(3), facts=RUN_FACTS)
    assert find_checkpoint(tmp_path).path == path
    assert listed(tmp_path) == [LATEST, "step-00000002", "step-00000003"]


@pytest.mark.parametrize("end", ["step-00000001", "step-00000002"])
def test_dying_while_a_step_is_replaced_loses_neither(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two renames of a replacement, with the run ended between them."""
    saved(tmp_path, 1)
    rename = Path.rename

    def stop(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    step = int(end[-1])
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path).save(step, tensors(step + 7), facts=RUN_FACTS)
    monkeypatch.undo()
    found = find_checkpoint(tmp_path)
    assert (read(found.path)["weight"] == 1).all()
    opened(tmp_path).save(step, tensors(step + 7), facts=RUN_FACTS)
    assert (read(find_checkpoint(tmp_path).path)["weight"] == step + 7).all()
    assert not [name for name in listed(tmp_path) if name.startswith(".")]


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for name in (".step-00000002.tmp", ".step-00000009.tmp"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "__0_0.distcp").write_bytes(b"half")
    assert find_checkpoint(tmp_path).skipped == []
    path = opened(tmp_path).save(2, tensors(2), facts=RUN_FACTS)
    assert (read(path)["weight"] == 2).all()
    assert listed(tmp_path) == [LATEST, "step-00000001", "step-00000002"]


def test_what_was_held_at_the_call_is_written_asynchronously(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, asynchronous=True)
    state = tensors(3)
    torch.manual_seed(5)
    losses = [1.0]
    assert checkpoints.save(3, state, facts={"losses": losses}) is None
    losses.append(2.0)
    expected = torch.randn(3)
    for value in (state["rotation"], state["weight"], *state["master"].tensors):
        value.fill_(9)
    path = checkpoints.wait()
    (twin,) = saved(tmp_path / "twin", 3)
    written, synchronous = read(path), read(twin)
    for name in ("rotation", "weight", "step"):
        assert torch.equal(written[name], synchronous[name])
    assert torch.equal(torch.cat(written["master"].tensors), torch.full((7,), 3.0))
    assert read_facts(path)["facts"] == {"losses": [1.0]}
    assert restore_random_states(path, communication=Communication())
    assert torch.equal(torch.randn(3), expected)
    assert checkpoints.wait() is None


def test_saving_again_completes_the_one_in_flight(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path, asynchronous=True)
    for step in (1, 2):
        checkpoints.save(step, tensors(step), facts=RUN_FACTS)
    assert find_checkpoint(tmp_path).path.name == "step-00000001"
    checkpoints.wait()
    assert find_checkpoint(tmp_path).path.name == "step-00000002"


def test_a_signal_while_the_last_one_is_completed_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = saved_state.complete

    def signalled(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        complete(*arguments, **options)

    monkeypatch.setattr(saved_state, "complete", signalled)
    with interruptible() as stop, pytest.raises(Interrupted, match="SIGTERM"):  # noqa: PT012
        checkpoints = opened(tmp_path, asynchronous=True)
        with checkpoints.completed(stop):
            checkpoints.save(4, tensors(4), facts=RUN_FACTS)
    assert find_checkpoint(tmp_path).path == tmp_path / "checkpoints" / "step-00000004"


@pytest.mark.parametrize("error", [FloatingPointError, ArithmeticError])
def test_what_all_ranks_raise_alike_completes_the_one_in_flight(tmp_path: Path, error: type[Exception]) -> None:
    checkpoints = opened(tmp_path, asynchronous=True)
    with pytest.raises(error), checkpoints.completed(StopRequest()):  # noqa: PT012
        checkpoints.save(5, tensors(5), facts=RUN_FACTS)
        raise error("a replica strayed")
    assert find_checkpoint(tmp_path).path == tmp_path / "checkpoints" / "step-00000005"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["shards", "random states", "facts"])
def test_a_full_disk_fails_in_one_line_and_saving_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, asynchronous: bool
) -> None:
    """The disk is full because a limit on the size of files, or a writer that says so, has it that way."""
    checkpoints = opened(tmp_path, asynchronous=asynchronous)
    checkpoints.save(1, tensors(1), facts=RUN_FACTS)
    checkpoints.wait()
    before = listed(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place = {
        "shards": "torch.distributed.checkpoint.filesystem._write_item",
        "random states": "torch.save",
        "facts": "rotexp.runfolder.checkpoint_folders.write_atomically",
    }[where]
    with monkeypatch.context() as limited:
        limited.setattr(place, full)
        with pytest.raises(OSError, match="No space left on device") as raised:
            checkpoints.save(2, tensors(2), facts=RUN_FACTS) or checkpoints.wait()
    assert "\n" not in str(raised.value)
    assert "train.checkpoint_every" in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert listed(tmp_path) == before
    checkpoints.save(3, tensors(3), facts=RUN_FACTS)
    checkpoints.wait()
    assert (read(find_checkpoint(tmp_path).path)["weight"] == 3).all()


def test_a_limit_of_the_system_on_the_size_of_files_is_a_full_disk_too(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(1, tensors(1), facts=RUN_FACTS)
    before = listed(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError, match=r"train\.checkpoint_every"):
            checkpoints.save(2, tensors(2, size=100_000), facts=RUN_FACTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert listed(tmp_path) == before


def test_facts_that_json_cannot_hold_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not JSON serializable"):
        opened(tmp_path).save(1, tensors(1), facts={"a": object()})
    assert listed(tmp_path) == []


def draws() -> list[float]:
    return [
        torch.rand(()).item(),
        float(np.random.rand()),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    np.random.randn()  # leaves the second of a pair of normal numbers for the next call
    random.gauss(0, 1)
    (path,) = saved(tmp_path, 1)
    expected = [draws() for _ in range(3)]
    assert draws() != expected[0]
    assert restore_random_states(path, communication=Communication())
    assert [draws() for _ in range(3)] == expected


def test_random_states_of_another_world_stay_behind(tmp_path: Path) -> None:
    (path,) = saved(tmp_path, 1)
    facts = json.loads((path / FACTS).read_text())
    (path / FACTS).write_text(json.dumps(facts | {"world_size": 2}))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert not restore_random_states(path, communication=Communication())
    assert torch.equal(torch.rand(2), expected)


KILLING = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from rotexp.sharding.communication import Communication
from rotexp.training import saved_state
from rotexp.training.saved_state import Checkpoints

def save_for_ever(folder, start, asynchronous):
    checkpoints = Checkpoints(folder, keep=2, asynchronous=asynchronous, communication=Communication())
    for step in range(start, start + 100_000):
        checkpoints.save(step, {"weight": torch.full((200_000,), float(step)), "step": torch.tensor(step)}, facts=facts)

torch.set_num_threads(1)
generator = random.Random(0)
folder, asynchronous, facts = Path(sys.argv[1]), sys.argv[2] == "True", json.loads(sys.argv[3])
latest = folder / "checkpoints" / "latest"

def moved():
    return latest.stat().st_mtime_ns if latest.exists() else 0

for line in sys.stdin:
    before, child = moved(), os.fork()
    if not child:
        save_for_ever(folder, int(line), asynchronous)
    while moved() == before:
        time.sleep(0.01)
    time.sleep(generator.uniform(0.0, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_kill_9_leaves_a_complete_checkpoint_at_every_moment(tmp_path: Path, asynchronous: bool) -> None:
    """One process forks another that saves all the time, kills it, and says so."""
    command = [sys.executable, "-c", KILLING, str(tmp_path), str(asynchronous), json.dumps(RUN_FACTS)]
    killer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    newest, half_written = 0, 0
    try:
        for _ in range(12):
            killer.stdin.write(f"{newest + 1}\n")
            killer.stdin.flush()
            assert killer.stdout.readline() == "killed\n"
            half_written += any(name.endswith(".tmp") for name in listed(tmp_path))
            step = step_of_newest(tmp_path)
            assert step > newest
            newest = step
    finally:
        killer.stdin.close()
        killer.wait(timeout=30)
        killer.stdout.close()
    assert half_written > 0, "none was killed in the middle of a save"


def step_of_newest(folder: Path) -> int:
    """Check that every folder called like a checkpoint is complete, and that the newest can be loaded."""
    found = find_checkpoint(folder)
    pointed = folder / "checkpoints" / (folder / "checkpoints" / LATEST).read_text().strip()
    assert found.skipped == []
    assert find_checkpoint(pointed).path == pointed
    state = {"weight": torch.zeros(200_000), "step": torch.tensor(0)}
    load(found.path, state, communication=Communication())
    step = int(state["step"])
    assert found.path.name == f"step-{step:08d}"
    assert (state["weight"] == step).all()
    return step


@pytest.mark.parametrize(("name", "value"), [("rotation", torch.nan), ("weight", torch.inf), ("master", -torch.inf)])
def test_numbers_that_are_not_finite_are_not_resumed_from(tmp_path: Path, name: str, value: float) -> None:
    state = tensors(1.0)
    held = state[name]
    (held.tensors[1] if isinstance(held, SplitVector) else held).view(-1)[-1] = value
    path = opened(tmp_path).save(1, state, facts=RUN_FACTS)
    found = "nan" if value != value else "inf"
    with pytest.raises(ValueError, match=rf"^resume={path}: {name} holds {found}; name another checkpoint, or resume="):
        load(path, tensors(2.0), communication=Communication())
