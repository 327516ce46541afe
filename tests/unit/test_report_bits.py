"""Runs that found the same bits share a letter, whatever they were spread over; others do not."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import PROTOCOL, make_run, step_row, summary
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from rotexp.comparison.bit_equal import MEANING, letters
from rotexp.comparison.collect import Report, collect
from rotexp.comparison.computing import deciding
from rotexp.comparison.payload import payload
from rotexp.comparison.table import to_csv
from rotexp.comparison.terminal import parts
from rotexp.runfolder.bits import rotations_digest

EXACT = {"numerics": {"mode": "exact"}}
NEXT = 30.000000000000004
"""The number after 30."""


def matrices(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 3, generator=generator) for name in ("R1", "R2_0")}


def found(**changes: Any) -> dict[str, Any]:
    """An end state with the digest of its rotations."""
    return summary(**{"rotations_digest": "abc"} | changes)


def with_config(folder: Path, **changes: Any) -> Path:
    """Write a run with groups beside those of every run."""
    make_run(folder, end=changes.pop("end", found()), **changes.pop("config", {}))
    file = folder / "config.resolved.yaml"
    groups = "\n".join(f"{group}: {json.dumps(values)}" for group, values in changes.items())
    file.write_text(f"{file.read_text()}\n{groups}\n")
    return folder


def report_of(tmp_path: Path, **ends: dict[str, Any] | None) -> Report:
    for name, end in ends.items():
        make_run(tmp_path / name, end=end)
    return collect([tmp_path], command="")


def printed(report: Report) -> str:
    console = Console(width=250, file=io.StringIO(), highlight=False)
    for part in parts(report, width=250):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_digest_is_of_names_shapes_and_bits_in_whatever_order(tmp_path: Path) -> None:
    held = matrices()

    def digest(tensors: dict[str, Tensor], **metadata: str) -> str:
        save_file(tensors, tmp_path / "rotations.safetensors", metadata=metadata)
        return rotations_digest(tmp_path / "rotations.safetensors")

    same = digest(held)
    assert len(same) == 64
    assert digest(dict(reversed(held.items())), seed="1") == same
    assert digest(matrices(1)) != same
    negated = held["R1"].clone()
    negated[0, 0] = torch.nextafter(held["R1"][0, 0], torch.tensor(9.0))
    assert digest(held | {"R1": negated}) != same
    assert digest({"R1": held["R1"], "R2_1": held["R2_0"]}) != same
    assert digest(held | {"R1": held["R1"].reshape(1, 3, 3)}) != same
    assert digest({name: matrix.double() for name, matrix in held.items()}) != same


def test_what_holds_no_rotations_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "rotations.safetensors").write_bytes(b"no rotations")
    for file in (tmp_path / "rotations.safetensors", tmp_path / "gone"):
        with pytest.raises(ValueError, match="cannot be read as safetensors"):
            rotations_digest(file)


def test_runs_of_the_same_bits_share_a_letter(tmp_path: Path) -> None:
    ends = {
        "a": found(),
        "b": found(world_size=4, time={"train": 9.0}),
        "c": found(rotations_digest="abd"),
        "d": found(),
    }
    assert report_of(tmp_path, **ends).letters == ["A", "A", "", "A"]


@pytest.mark.parametrize(
    "other",
    [found(perplexity=NEXT), found(rotations_digest="abd"), found(status="failed"), summary()],
    ids=["figure", "rotations", "failed", "no digest"],
)
def test_other_bits_have_none(tmp_path: Path, other: dict[str, Any]) -> None:
    report = report_of(tmp_path, a=found(), b=other)
    assert report.letters == ["", ""]
    assert "bits" not in printed(report).split("configuration")[0]


def test_every_loss_counts(tmp_path: Path) -> None:
    for name, loss in (("a", 2.5), ("b", 2.5000000000000004), ("c", 2.5), ("d", "nan"), ("e", "nan")):
        rows = [step_row(1), step_row(2, loss=loss), step_row(3), step_row(4)]
        make_run(tmp_path / name, end=found(), rows=rows)
    assert collect([tmp_path], command="").letters == ["A", "", "A", "B", "B"]


def test_the_protocol_of_figures_is_none_of_them(tmp_path: Path) -> None:
    other = found()
    other["evaluation"]["protocol"] = PROTOCOL | {"calibration_digest": "x"}
    assert report_of(tmp_path, a=found(), b=other).letters == ["A", "A"]


def test_older_runs_are_known_by_their_files(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_file(matrices(seed), make_run(tmp_path / name) / "rotations.safetensors")
    assert collect([tmp_path], command="").letters == ["A", "A", ""]


def test_runs_that_trained_nothing_are_known_by_their_figures(tmp_path: Path) -> None:
    nothing = {"train": {"steps": 0}}
    for name, end in (("a", summary(**nothing)), ("b", found(**nothing)), ("c", summary(perplexity=NEXT, **nothing))):
        make_run(tmp_path / name, end=end, rows=[])
    assert collect([tmp_path], command="").letters == ["A", "A", ""]


def test_letters_go_on_after_z() -> None:
    pairs = [str(number) for number in range(28) for _ in range(2)]
    assert letters(pairs)[::2] == [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "AA", "AB"]
    assert letters([None, None, "x"]) == ["", "", ""]


def test_letters_are_told_everywhere(tmp_path: Path) -> None:
    report = report_of(tmp_path, a=found(), b=found(), c=found(perplexity=31.0))
    text = printed(report)
    assert f"bits: {MEANING}" in " ".join(text.split())
    assert [line.split("│")[3].strip() for line in text.splitlines() if line.startswith("│ ")][:3] == ["A", "A", ""]
    assert [row["bits"] for row in csv.DictReader(io.StringIO(to_csv(report)))] == ["A", "A", ""]
    data = payload(report)
    assert (data["bits"], [run["bits"] for run in data["runs"]]) == (MEANING, ["A", "A", ""])


def test_numerics_is_an_axis_by_its_option(tmp_path: Path) -> None:
    with_config(tmp_path / "a", numerics={"mode": "fast", "noise_seed": None})
    with_config(tmp_path / "b", numerics={"mode": "exact", "noise_seed": None})
    report = collect([tmp_path], command="")
    assert [axis.label for axis in report.axes] == ["numerics"]
    assert report.settings == ["numerics=fast", "numerics=exact"]


def test_broken_promises_of_exact_numerics_are_told(tmp_path: Path) -> None:
    full = {"config": {"sharding__strategy": "full", "tracker__run_name": "x"}}
    with_config(tmp_path / "a", **EXACT, end=found(machine={"cpu": "x", "threads": 2}))
    with_config(tmp_path / "b", **EXACT, **full, end=found(perplexity=NEXT, machine={"cpu": "x", "threads": 1}))
    with_config(tmp_path / "other-machine", **EXACT, end=found(perplexity=29.0, machine={"cpu": "y", "threads": 1}))
    chosen = found(perplexity=28.0, machine={"cpu": "x", "threads": 1})
    with_config(tmp_path / "chosen-threads", **EXACT, launch={"threads": 1}, end=chosen)
    with_config(tmp_path / "other-seed", **EXACT, config={"seed": 1}, end=found(perplexity=31.0))
    with_config(tmp_path / "other-versions", **EXACT, end=found(perplexity=32.0, versions={"torch": "3"}))
    with_config(tmp_path / "failed", **EXACT, end=found(perplexity=33.0, status="failed"))
    (note,) = collect([tmp_path], command="").notes
    assert note.startswith("a and b computed the same under numerics=exact, and their bits differ")


def test_fast_numerics_promise_nothing(tmp_path: Path) -> None:
    for name, perplexity in (("a", 30.0), ("b", NEXT)):
        with_config(tmp_path / name, numerics={"mode": "fast"}, end=found(perplexity=perplexity))
    assert collect([tmp_path], command="").notes == []


def test_precision_decides_bits_and_sharding_only_in_fast_numerics() -> None:
    config = {"seed": 0, "sharding.strategy": "full", "sharding.param_dtype": "bfloat16", "sync_mode.mode": "off"}
    config |= {"launch.nproc": 2, "launch.threads": 1, "resume": "auto", "tracker.mode": "auto"}
    assert deciding(config, exact=True).keys() == {"seed", "sharding.param_dtype"}
    fast = {"seed", "sharding.strategy", "sharding.param_dtype", "sync_mode.mode", "launch.nproc"}
    assert deciding(config, exact=False).keys() == fast
