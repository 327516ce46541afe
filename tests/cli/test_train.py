"""The main job from the outside: what it prints, what its folder holds, that it repeats, and how it fails."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_train import Run, run_train
from safetensors import safe_open

from rotexp.launch.readiness import GIB, NEEDED_DISK_GIB, NEEDED_MEMORY_GIB

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
CHECK_RUN = REPOSITORY.parent / "shared" / "acceptance" / "check_run.py"

Train = Callable[..., Run]


@pytest.fixture(scope="module")
def train(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run the small job with further arguments, in a new folder; check that no process outlives it."""

    def run(*arguments: str, **options: Any) -> Run:
        folder = options.pop("folder", None) or tmp_path_factory.mktemp("run") / "folder"
        given = {argument.partition("=")[0] for argument in arguments}
        kept = [override for override in small if override.partition("=")[0] not in given]
        ended = run_train(folder, *arguments, *kept, **options)
        assert ended.left_behind == []
        return ended

    return run


@pytest.fixture(scope="module")
def done(train: Train) -> Run:
    """The job with every default that is not a size."""
    ended = train()
    assert (ended.code, ended.errors) == (0, "")
    return ended


def test_a_run_leaves_the_files_of_the_contract(done: Run) -> None:
    assert {path.name for path in done.folder.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.resolved.yaml",
        "metrics.jsonl",
        "rank-0.log",
        "rotations.safetensors",
        "rotations_best.safetensors",
        "summary.json",
        "wandb",
    }
    assert len(list(done.folder.glob("wandb/offline-run-*/*.wandb"))) == 1


@pytest.mark.skipif(not CHECK_RUN.is_file(), reason=f"{CHECK_RUN} is not there")
def test_a_run_passes_the_acceptance_check(done: Run) -> None:
    check = subprocess.run(
        [sys.executable, str(CHECK_RUN), str(done.folder), "--steps", "2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (check.returncode, check.stdout) == (0, f"0 faults in {done.folder.name}\n")


def test_a_run_logs_every_step_and_every_phase(done: Run) -> None:
    assert [row["step"] for row in done.steps] == [1, 2]
    assert [row["train/tokens"] for row in done.steps] == [128, 256]
    assert done.steps[0]["train/lr"] == pytest.approx(0.1)
    phases = {key for row in done.rows for key in row if re.fullmatch(r"time/\w+_s", key)}
    names = ("load", "shard", "prepare", "baseline", "train", "merge", "evaluate", "save", "step", "data")
    assert {f"time/{name}_s" for name in names} <= phases
    assert [row["step"] for row in done.rows] == sorted(row["step"] for row in done.rows)


def test_a_run_summarizes_its_end(done: Run) -> None:
    summary, losses = done.summary, [row["train/loss"] for row in done.steps]
    assert (summary["status"], summary["error"], summary["world_size"]) == ("done", None, 1)
    train = summary["train"]
    assert (train["steps"], train["loss_start"], train["loss_end"]) == (2, *losses)
    assert train["best_step"] == 1 + losses.index(min(losses))
    assert train["improved"] == (done.perplexities["trained"] < done.perplexities["hadamard"])
    assert list(done.perplexities) == ["float", "quantized", "hadamard", "trained"]
    assert summary["evaluation"]["float"] == {
        "perplexity": done.perplexities["float"],
        "kl": 0.0,
        "top1_agreement": 1.0,
    }
    protocol = summary["evaluation"]["protocol"]
    assert (protocol["window"], protocol["stride"], protocol["tokens_scored"]) == (32, 32, 4 * 31)
    assert summary["versions"].keys() >= {"python", "torch", "transformers", "rotexp"}


def test_a_run_summarizes_the_drift_of_every_rotation_before_it_is_projected(done: Run) -> None:
    """Projected, as the file has them, they are all within 1e-7 whatever training did."""
    rows = {row["rotation"]: row for row in done.summary["rotations"]}
    assert rows.keys() == done.rotations.keys()
    for figure in ("orthogonality_rrt_max", "orthogonality_rtr_max"):
        drifts = [row[figure] for row in rows.values()]
        assert max(drifts) == done.summary["rotation"][figure] == done.steps[-1][f"rotation/{figure}"]
        assert len(set(drifts)) > 1
    for name, matrix in done.rotations.items():
        error = (matrix.double() @ matrix.double().mT - torch.eye(len(matrix))).abs().max().item()
        assert error < rows[name]["orthogonality_rrt_max"]


def test_a_run_prints_plain_progress_the_table_and_the_folder(done: Run) -> None:
    assert "\x1b" not in done.output
    assert "\r" not in done.output
    lines = done.output.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [re.sub(r"[\d.,]+", "#", line) for line in steps] == ["step #/#  loss #  # tokens/s  # GiB  # s left"] * 2
    assert float(steps[1].split()[3]) == pytest.approx(done.steps[1]["train/loss"], abs=1e-4)
    table = {cells[1].strip(): cells for line in lines if len(cells := line.split("│")) > 4}
    for label, row in {"float": "float", "no rotation": "quantized", "random Hadamard": "hadamard"}.items():
        assert float(table[label][2]) == pytest.approx(done.perplexities[row], abs=0.01)
    change = done.perplexities["trained"] / done.perplexities["float"] - 1
    assert table["trained"][3].strip() == f"{change:+.1%}"
    assert lines[-1] == f"run folder: {done.folder}"


def test_rotations_are_orthogonal_and_say_where_they_belong(done: Run, checkpoint: Path) -> None:
    rotations = done.rotations
    assert sorted(tuple(matrix.shape) for matrix in rotations.values()) == [(12, 12), (12, 12), (48, 48)]
    for matrix in rotations.values():
        assert matrix.dtype == torch.float32
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(len(matrix)), rtol=0, atol=1e-6)
    with safe_open(done.folder / "rotations.safetensors", framework="pt") as file:
        metadata = file.metadata()
    described = json.loads(metadata["rotations"])
    assert described.keys() == rotations.keys()
    assert {tuple(entry["shape"]) for entry in described.values()} == {(48, 48), (12, 12)}
    assert all(entry["placement"] and entry["dtype"] == "float32" for entry in described.values())
    assert (metadata["model"], metadata["seed"]) == (str(checkpoint), "0")
    assert metadata["config_digest"] == done.summary["config_digest"]


def test_the_resolved_configuration_repeats_the_run_bit_for_bit(done: Run, train: Train, tmp_path: Path) -> None:
    again = run_train(tmp_path / "again", "--config-dir", str(done.folder), "--config-name", "config.resolved")
    assert (again.code, again.errors) == (0, "")
    assert again.summary["config_digest"] == done.summary["config_digest"]
    assert again.summary["evaluation"] == done.summary["evaluation"]
    for key in ("train/loss", "grad_norm/total"):
        assert [row[key] for row in again.steps] == [row[key] for row in done.steps]
    assert again.rotations.keys() == done.rotations.keys()
    assert all(torch.equal(matrix, done.rotations[name]) for name, matrix in again.rotations.items())
    resolved = [(run.folder / "config.resolved.yaml").read_bytes() for run in (done, again)]
    assert resolved[0] == resolved[1]


def test_another_seed_gives_another_run(done: Run, train: Train) -> None:
    other = train("seed=1", "tracker=jsonl")
    assert other.perplexities["float"] == done.perplexities["float"]
    assert other.perplexities["quantized"] == done.perplexities["quantized"]
    assert other.perplexities["hadamard"] != done.perplexities["hadamard"]
    assert not (other.folder / "wandb").exists()


def test_a_folder_that_holds_a_run_is_refused_and_left_unchanged(done: Run, train: Train) -> None:
    before = contents(done.folder)
    refused = train(folder=done.folder)
    assert refused.code == 2
    assert refused.errors == (
        f"rotexp: hydra.run.dir={done.folder}: already holds a run (status done); choose another, or remove it\n"
    )
    assert refused.output == ""
    assert contents(done.folder) == before


def test_no_steps_prepare_evaluate_and_save(train: Train) -> None:
    ended = train("train.steps=0", "tracker=jsonl")
    assert (ended.code, ended.errors, ended.steps) == (0, "", [])
    train_summary = ended.summary["train"]
    assert [train_summary[key] for key in ("steps", "loss_start", "loss_end", "best_step")] == [0, None, None, None]
    assert train_summary["improved"] is not True, "rounding is no improvement"
    assert ended.perplexities["trained"] == pytest.approx(ended.perplexities["hadamard"], rel=1e-3)
    assert len(ended.rotations) == 3


@pytest.fixture(scope="module")
def sweep(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One sweep over rotations and quantizers, its runs by their overrides."""
    folder = tmp_path_factory.mktemp("sweep")
    rotations, quants = ("none", "hadamard", "learned_r4"), ("w4a4", "w4a4kv4")
    ended = train(
        "-m",
        f"rotation={','.join(rotations)}",
        f"quant={','.join(quants)}",
        "objective=kl_topk",
        "tracker=jsonl",
        f"hydra.sweep.dir={folder}",
    )
    assert (ended.code, ended.errors) == (0, "")
    pairs = [(rotation, quant) for rotation in rotations for quant in quants]
    return {
        f"{rotation} {quant}": Run(folder / f"rotation-{rotation}__quant-{quant}", 0, "", "")
        for rotation, quant in pairs
    }


def test_every_run_of_a_sweep_is_whole_and_its_own(sweep: dict[str, Run]) -> None:
    assert [run.summary["status"] for run in sweep.values()] == ["done"] * 6
    assert len({run.summary["config_digest"] for run in sweep.values()}) == 6
    assert {run.perplexities["float"] for run in sweep.values()} == {sweep["none w4a4"].perplexities["float"]}


@pytest.mark.parametrize("quant", ["w4a4", "w4a4kv4"])
def test_without_rotation_nothing_is_trained_and_the_figures_stay(sweep: dict[str, Run], quant: str) -> None:
    """Only the folded norm gains, which meet the quantizers differently, tell the result from the model as it came."""
    run = sweep[f"none {quant}"]
    assert run.perplexities["trained"] == pytest.approx(run.perplexities["quantized"], rel=0.02)
    assert "hadamard" not in run.perplexities
    assert (run.rotations, run.steps, run.summary["train"]["improved"]) == ({}, [], None)


@pytest.mark.parametrize("quant", ["w4a4", "w4a4kv4"])
def test_fixed_hadamard_rotations_are_the_baseline_itself(sweep: dict[str, Run], quant: str) -> None:
    run = sweep[f"hadamard {quant}"]
    assert run.steps == []
    assert run.perplexities["trained"] == pytest.approx(run.perplexities["hadamard"], rel=1e-3)
    assert run.perplexities["hadamard"] != run.perplexities["quantized"]


def test_online_hadamard_stays_out_of_the_file_but_acts(sweep: dict[str, Run]) -> None:
    run = sweep["learned_r4 w4a4"]
    assert len(run.rotations) == 3
    with safe_open(run.folder / "rotations.safetensors", framework="pt") as file:
        assert set(json.loads(file.metadata()["online"]).values()) == {80}
    assert run.perplexities["hadamard"] != sweep["hadamard w4a4"].perplexities["hadamard"]


def test_quantized_keys_and_values_change_the_figures(sweep: dict[str, Run]) -> None:
    for rotation in ("none", "hadamard", "learned_r4"):
        plain, kv = (sweep[f"{rotation} {quant}"].summary["evaluation"]["quantized"] for quant in ("w4a4", "w4a4kv4"))
        assert plain["kl"] != kv["kl"]


def test_the_divergence_objective_starts_near_zero(sweep: dict[str, Run], done: Run) -> None:
    losses = [row["train/loss"] for row in sweep["learned_r4 w4a4"].steps]
    assert len(losses) == 2
    assert all(0 < loss < 0.1 * done.steps[0]["train/loss"] for loss in losses)


@pytest.fixture(scope="module")
def two_ranks(train: Train) -> dict[str, Run]:
    """The job on two ranks that it starts itself, by sharding."""
    return {
        sharding: train(f"sharding={sharding}", "launch=elastic", "launch.nproc=2", "tracker=jsonl")
        for sharding in ("no_shard", "full")
    }


@pytest.mark.parametrize("sharding", ["no_shard", "full"])
def test_two_ranks_train_as_one_does(sharding: str, two_ranks: dict[str, Run], done: Run) -> None:
    run = two_ranks[sharding]
    assert (run.code, run.errors) == (0, "")
    assert (run.summary["status"], run.summary["world_size"]) == ("done", 2)
    assert run.summary["replica"]["max_abs_diff"] == 0
    assert run.steps[0]["train/loss"] == pytest.approx(done.steps[0]["train/loss"], rel=1e-5)
    assert run.steps[1]["train/loss"] == pytest.approx(done.steps[1]["train/loss"], rel=1e-4)
    assert run.perplexities == pytest.approx(done.perplexities, rel=1e-3)
    assert run.rotations.keys() == done.rotations.keys()


def test_two_ranks_shard_as_asked_and_print_once(two_ranks: dict[str, Run]) -> None:
    whole, split = (two_ranks[name].summary["sharding"]["effective"] for name in ("no_shard", "full"))
    assert (whole["sharded"], split["replicated"]) == (0, 0)
    assert whole["replicated"] == split["sharded"] > 0
    assert split["bytes_local"] < 0.6 * whole["bytes_local"]
    for run in two_ranks.values():
        assert run.output.count("run folder: ") == 1
        assert run.output.count("random Hadamard") == 1
        assert {path.name for path in run.folder.glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}


FULL_DISK = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
runpy.run_module("rotexp.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_ends_the_run_with_one_line_that_names_the_phase(ranks: int, train: Train) -> None:
    """Files may not grow beyond what all but rotations need, as if the disk were full at the first checkpoint."""
    launch = [] if ranks == 1 else ["launch=elastic", "launch.nproc=2"]
    ended = train("tracker=jsonl", *launch, program=("-c", FULL_DISK.format(limit=8192)))
    assert ended.code == 1
    assert ended.errors.count("\n") == 1, ended.errors
    assert "phase train: OSError: the checkpoint " in ended.errors
    assert "could not be written (" in ended.errors
    assert "; make room there, " in ended.errors
    assert ended.summary["status"] == "failed"
    assert ended.summary["error"] in ended.errors
    assert len(ended.steps) == 2
    assert {path.name for path in ended.folder.iterdir() if path.name.startswith((".", "rotations"))} == {".lock"}
    assert not list(ended.folder.glob("checkpoints/*"))
    assert "Traceback" in (ended.folder / "rank-0.log").read_text(encoding="utf-8")


def test_a_disk_too_full_for_anything_still_ends_with_code_1_and_no_half_file(train: Train) -> None:
    ended = train("tracker=jsonl", program=("-c", FULL_DISK.format(limit=10)))
    assert ended.code == 1
    assert "Traceback" not in ended.errors
    assert "File too large" in ended.errors
    assert [path.name for path in ended.folder.glob(".*")] == [".lock"]
    for path in ended.folder.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file below a folder with its bytes and its time of change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the repository's files; `conf` is reached through it as `rotexp.conf`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
    )
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "rotexp" / "conf").symlink_to(tmp_path / "conf")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="needs the repository's list of files")
def test_the_main_command_in_a_copy_of_the_repository_shows_training_helping(copy: Path) -> None:
    readme = (copy / "README.md").read_text(encoding="utf-8")
    assert "python -m rotexp.train" in readme
    ended = subprocess.run(
        [sys.executable, "-m", "rotexp.train"], check=False, capture_output=True, text=True, cwd=copy, timeout=800
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    folder = Path(ended.stdout.splitlines()[-1].removeprefix("run folder: "))
    assert (copy / folder).resolve().is_relative_to(copy.resolve())
    run = Run(copy / folder, 0, ended.stdout, "")
    assert run.summary["status"] == "done"
    assert run.perplexities["trained"] < run.perplexities["hadamard"] < run.perplexities["quantized"]
    assert run.perplexities["float"] < run.perplexities["trained"]
    assert run.summary["train"]["improved"] is True
    peaks = [phase["peak_rss_gib_max"] for phase in run.summary["memory"].values()]
    assert 0.5 < max(peaks) < NEEDED_MEMORY_GIB
    size = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    assert 1e-4 < size / GIB < NEEDED_DISK_GIB


def test_a_profile_says_where_the_steps_went(train: Train) -> None:
    ended = train("tracker=jsonl", "profile=true", "train.steps=5")
    assert (ended.code, ended.errors) == (0, "")
    table = {line.split()[1]: line for line in ended.output.splitlines() if line.startswith("│")}
    assert {"data", "forward", "backward", "consolidate", "clip", "optimizer", "metrics"} <= table.keys()
    events = json.loads((ended.folder / "trace-rank-0.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = [event["name"] for event in events if event.get("name", "").startswith("rotexp/")]
    assert (spans.count("rotexp/forward"), spans.count("rotexp/optimizer")) == (3, 3), "one to warm up, then three"


def test_a_run_starts_from_the_rotations_of_another(train: Train, done: Run) -> None:
    file = done.folder / "rotations.safetensors"
    ended = train("tracker=jsonl", f"rotation.path={file}", "train.steps=0")
    assert (ended.code, ended.errors) == (0, "")
    assert ended.perplexities["trained"] == done.perplexities["trained"]
    for name, matrix in ended.rotations.items():
        torch.testing.assert_close(matrix, done.rotations[name], rtol=0, atol=0)
    refused = train(f"rotation.path={file}", "rotation=learned_r4")
    assert (refused.code, refused.errors.count("\n")) == (2, 1)
    assert "it was trained with no online transform, and here is R4 of order 80 online" in refused.errors


def test_blocks_and_online_rotations_train_alike_on_two_ranks(train: Train) -> None:
    options = ("tracker=jsonl", "rotation=learned_r3_r4", "rotation.block_size=16", "quant=w4a4kv4")
    one, two = train(*options), train(*options, "sharding=full", "launch.nproc=2")
    assert (one.code, two.code) == (0, 0), one.errors + two.errors
    assert one.rotations["R1"].shape == (3, 16, 16)
    assert two.steps[0]["train/loss"] == pytest.approx(one.steps[0]["train/loss"], rel=1e-5)
    assert two.perplexities == pytest.approx(one.perplexities, rel=1e-3)
    assert two.summary["replica"]["max_abs_diff"] == 0


def test_what_a_model_does_not_let_exist_is_left_out_or_refused(train: Train, odd_checkpoint: Path) -> None:
    model = ("model=hf", f"model.path={odd_checkpoint}", "tracker=jsonl")
    ended = train(*model, "rotation.r4=null")
    assert (ended.code, ended.errors) == (0, "")
    assert "warning: R4 is left out: no Hadamard matrix of order 50 exists" in ended.output
    for wrong, reason in {
        "rotation.r4=true": "rotation.r4=true: cannot act: no Hadamard matrix of order 50 exists",
        "rotation.block_size=7": "rotation.block_size=7: must divide 48",
    }.items():
        refused = train(*model, wrong)
        assert (refused.code, refused.errors.count("\n")) == (2, 1)
        assert reason in refused.errors


def test_ranks_leave_nothing_in_the_temporary_folder(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ended = train("tracker=jsonl", "train.steps=1", "launch=elastic", "launch.nproc=2")
    assert (ended.code, ended.errors) == (0, "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("torchelastic", "rotexp"))] == []
