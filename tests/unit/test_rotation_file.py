"""Files of rotations come back bit for bit, are written whole or not at all, and are refused with every fault named."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rotexp.rotation import file as rotation_file
from rotexp.rotation.bank import RotationBank, draw
from rotexp.rotation.file import LoadedRotations, assign_rotations, load_rotations, save_r_bin, save_rotations

FIELD_KEYS = ["R1", "model.layers.0.self_attn.R2", "model.layers.10.self_attn.R2"]
PLACES = {"R1": "residual stream", "R2_0": "layer 0", "R2_10": "layer 10"}
MODEL: dict[str, Any] = {"model": "tiny", "placements": PLACES, "online": {}}


def rotations(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    drawn = {name: draw("random", order, name=name, seed=3) for name, order in zip(PLACES, (24, 8, 8), strict=True)}
    return {name: matrix.to(dtype) for name, matrix in drawn.items()}


def blocks(count: int = 3, order: int = 8) -> Tensor:
    return torch.stack([draw("random", order, name=f"block {index}", seed=3) for index in range(count)])


def bank_of(matrices: dict[str, Tensor]) -> RotationBank:
    """A bank of such shapes that holds identities."""
    bank = RotationBank()
    for name, matrix in matrices.items():
        bank.add(name, torch.eye(matrix.shape[-1]).expand(matrix.shape).clone())
    return bank


def save(path: Path, matrices: dict[str, Tensor], **facts: Any) -> Path:
    online = facts.pop("online", {})
    save_rotations(path, matrices, placements=PLACES, online=online, facts={"model": "tiny"} | facts)
    return path


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        matrix.dtype == second[name].dtype and torch.equal(matrix, second[name]) for name, matrix in first.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_safetensors_come_back_bit_for_bit_with_what_was_said_of_them(dtype: torch.dtype, tmp_path: Path) -> None:
    given = rotations(dtype) | {"R2_10": blocks().to(dtype)}
    loaded = load_rotations(save(tmp_path / "rotations.safetensors", given, seed=7, online={"R4": 80}))
    assert same(loaded.matrices, given)
    assert (loaded.placements, loaded.online) == (PLACES, {"R4": 80})
    assert loaded.facts == {"model": "tiny", "seed": "7"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_r_bin_comes_back_bit_for_bit_under_the_fields_names(dtype: torch.dtype, tmp_path: Path) -> None:
    given = rotations(dtype)
    save_r_bin(tmp_path / "R.bin", given)
    assert list(torch.load(tmp_path / "R.bin", weights_only=True)) == FIELD_KEYS
    loaded = load_rotations(tmp_path / "R.bin")
    assert same(loaded.matrices, given)
    assert (loaded.placements, loaded.online, loaded.facts) == (None, None, {})


def test_the_same_rotations_give_the_same_r_bin(tmp_path: Path) -> None:
    save_r_bin(tmp_path / "R.bin", rotations())
    save_r_bin(tmp_path / "again.bin", load_rotations(tmp_path / "R.bin").matrices)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "R.bin").read_bytes()


def test_r_bin_of_other_tools_is_read_whatever_its_layers_and_containers(tmp_path: Path) -> None:
    """They store trained parameters, in float64, under the names of their own model."""
    given = rotations(torch.float64)
    names = ["R1", "model.decoder.layers.0.self_attn.R2", "model.decoder.layers.10.self_attn.R2"]
    stored = {name: nn.Parameter(matrix) for name, matrix in zip(names, given.values(), strict=True)}
    torch.save(stored, tmp_path / "R.bin")
    loaded = load_rotations(tmp_path / "R.bin").matrices
    assert same(loaded, given)
    assert not any(matrix.requires_grad for matrix in loaded.values())
    save_r_bin(tmp_path / "ours.bin", given, layers="model.decoder.layers")
    assert list(torch.load(tmp_path / "ours.bin", weights_only=True)) == names


def test_blocks_are_dense_in_r_bin_and_blocks_again_in_the_bank(tmp_path: Path) -> None:
    given = {"R1": blocks()}
    save_r_bin(tmp_path / "R.bin", given)
    loaded = load_rotations(tmp_path / "R.bin")
    assert torch.equal(loaded.matrices["R1"], torch.block_diag(*given["R1"]))  # type: ignore[no-untyped-call]
    bank = bank_of(given)
    assert assign_rotations(bank, loaded, **MODEL) == {}
    assert torch.equal(bank["R1"], given["R1"])


def test_rotations_without_a_place_in_r_bin_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rotation R5: R.bin holds R1 and each layer's R2 only; export rotations"):
        save_r_bin(tmp_path / "R.bin", {"R5": torch.eye(4)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rotations.safetensors", "R.bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bank_takes_a_file_in_its_own_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    given = rotations(dtype)
    save(tmp_path / name, given) if name.endswith("safetensors") else save_r_bin(tmp_path / name, given)
    bank = bank_of(given)
    assert assign_rotations(bank, load_rotations(tmp_path / name), **MODEL) == {}
    assert same(bank.snapshot(), {key: matrix.float() for key, matrix in given.items()})


def test_coarse_matrices_are_brought_back_to_orthogonal_and_named(tmp_path: Path) -> None:
    given = rotations() | {"R1": rotations()["R1"].bfloat16()}
    save_r_bin(tmp_path / "R.bin", given)
    bank = bank_of(rotations())
    replaced = assign_rotations(bank, load_rotations(tmp_path / "R.bin"), **MODEL)
    assert list(replaced) == ["R1"]
    assert 1e-5 < replaced["R1"] < 1e-2
    taken = bank["R1"].detach().double()
    torch.testing.assert_close(taken @ taken.mT, torch.eye(24, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(taken, given["R1"].double(), rtol=0, atol=1e-2)
    assert torch.equal(bank["R2_0"], given["R2_0"])


def change(**matrices: Tensor | None) -> dict[str, Tensor]:
    return {name: matrix for name, matrix in (rotations() | matrices).items() if matrix is not None}


UNFIT = {
    "missing": (change(R2_0=None), ["R2_0 is missing"]),
    "unexpected": (change(R2_3=torch.eye(8)), ["R2_3 has no place in this model"]),
    "of another shape": (change(R1=torch.eye(16)), ["R1 is [16, 16] instead of [24, 24]"]),
    "not square": (change(R1=torch.zeros(24, 8)), ["R1 is [24, 8] instead of [24, 24]"]),
    "not orthogonal": (change(R2_0=torch.eye(8) * 1.01), ["R2_0 is not orthogonal (max|R Rᵀ − I| = 2.0e-02"]),
    "not finite": (change(R2_0=torch.full((8, 8), torch.nan)), ["R2_0 holds nan"]),
    "infinite": (change(R1=torch.eye(24).index_fill(0, torch.tensor(3), -torch.inf)), ["R1 holds inf"]),
    "in fp8": (change(R2_0=torch.eye(8).to(torch.float8_e4m3fn)), ["R2_0 is float8_e4m3fn, not one of float64, "]),
    "of whole numbers": (
        change(R2_0=torch.eye(8, dtype=torch.int64)),
        ["R2_0 is int64, not one of float64, float32, bfloat16, float16"],
    ),
    "several": (change(R1=torch.eye(2), R2_0=torch.zeros(8, 8), R2_10=None), ["R2_10 is missing; R1 is", "; R2_0 is"]),
}


@pytest.mark.parametrize("fault", UNFIT)
def test_matrices_that_do_not_fit_are_named_and_nothing_is_assigned(fault: str, tmp_path: Path) -> None:
    matrices, said = UNFIT[fault]
    save_r_bin(tmp_path / "R.bin", matrices)
    bank = bank_of(rotations())
    before = bank.snapshot()
    with pytest.raises(
        ValueError, match=r"^rotation.path=.*R\.bin: .*; name a file of rotations of this model$"
    ) as end:
        assign_rotations(bank, load_rotations(tmp_path / "R.bin"), **MODEL)
    assert [part for part in said if part not in str(end.value)] == [], str(end.value)
    assert same(bank.snapshot(), before)


def test_many_faults_are_counted(tmp_path: Path) -> None:
    given = {f"R2_{index}": torch.eye(4) for index in range(20)}
    loaded = LoadedRotations(tmp_path / "R.bin", {})
    with pytest.raises(ValueError, match=r"; and 14 more; name a file"):
        assign_rotations(bank_of(given), loaded, model="tiny", placements={}, online={})


def test_a_dense_matrix_is_not_taken_for_blocks(tmp_path: Path) -> None:
    loaded = LoadedRotations(tmp_path / "R.bin", {"R1": draw("random", 24, name="R1", seed=0)})
    with pytest.raises(ValueError, match=r"R1 is \[24, 24\] instead of \[3, 8, 8\] and not block-diagonal"):
        assign_rotations(bank_of({"R1": blocks()}), loaded, model="tiny", placements={}, online={})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"model": "large"}, "its rotations are of model tiny, not large"),
        ({"placements": PLACES | {"R1": "elsewhere"}}, "its R1 acts at residual stream, not at elsewhere"),
        ({"online": {}}, "it was trained with R4 of order 80 online, and here is no online transform"),
        ({"online": {"R4": 40}}, "it was trained with R4 of order 80 online, and here is R4 of order 40 online"),
    ],
)
def test_a_file_of_another_model_or_placement_is_refused(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    loaded = load_rotations(save(tmp_path / "rotations.safetensors", rotations(), online={"R4": 80}))
    bank = bank_of(rotations())
    with pytest.raises(
        ValueError, match=r"^rotation.path=.*; name a file of the same model and rotation group$"
    ) as end:
        assign_rotations(bank, loaded, **MODEL | {"online": {"R4": 80}} | other)
    assert said in str(end.value)
    assert torch.equal(bank["R1"], torch.eye(24))


class Payload:
    """Unpickled without an allow-list, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("writer", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_payload_is_refused_and_not_run(writer: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    writer({"R1": torch.eye(4), "payload": Payload(trace)}, tmp_path / "R.bin")
    with pytest.raises(ValueError, match=r"R.bin: (holds more than tensors|cannot be read by torch)") as end:
        load_rotations(tmp_path / "R.bin")
    assert "weights_only=False" not in str(end.value)
    assert "\n" not in str(end.value)
    assert not trace.exists()


def write_cut(path: Path, size: int) -> None:
    whole = path.with_name(f"whole{path.suffix}")
    save(whole, rotations()) if path.suffix == ".safetensors" else save_r_bin(whole, rotations())
    path.write_bytes(whole.read_bytes()[:size])


UNREADABLE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no file": ("R.bin", lambda path: None, "no such file; name a rotations.safetensors or R.bin"),
    "a folder": ("R.bin", Path.mkdir, "is a folder; name a file in it, such as rotations.safetensors"),
    "a suffix": ("R.npz", Path.touch, "must end in .safetensors, or in .bin, .pt or .pth"),
    "empty tensors": ("R.safetensors", Path.touch, "cannot be read as safetensors ("),
    "empty pickle": ("R.bin", Path.touch, "cannot be read by torch ("),
    "cut tensors": ("R.safetensors", lambda path: write_cut(path, 900), "cannot be read as safetensors ("),
    "cut pickle": ("R.bin", lambda path: write_cut(path, 1500), "cannot be read by torch ("),
    "cut early": ("R.bin", lambda path: write_cut(path, 30), "cannot be read by torch ("),
    "text": ("R.bin", lambda path: path.write_text("R1"), "cannot be read by torch ("),
    "not ours": ("R.safetensors", lambda path: save_file(rotations(), path), "was not written by rotexp"),
    "no placements": (
        "R.safetensors",
        lambda path: save_file(rotations(), path, metadata={"format": "rotexp", "online": "{}"}),
        "its metadata cannot be read (KeyError: 'rotations')",
    ),
    "wrong metadata": (
        "R.safetensors",
        lambda path: save_file(rotations(), path, metadata={"format": "rotexp", "rotations": "[]", "online": "{}"}),
        "its metadata cannot be read (AttributeError: ",
    ),
    "deep metadata": (
        "R.safetensors",
        lambda path: save_file(
            rotations(), path, metadata={"format": "rotexp", "rotations": "[" * 100_000, "online": "{}"}
        ),
        "its metadata cannot be read (RecursionError: ",
    ),
    "a matrix alone": ("R.bin", lambda path: torch.save(torch.eye(3), path), "holds a Tensor, not matrices by name"),
    "other keys": (
        "R.bin",
        lambda path: torch.save({"R1": torch.eye(3), "model.norm.weight": torch.ones(3)}, path),
        "model.norm.weight is neither R1 nor <layers>.i.self_attn.R2; name a file of rotations only",
    ),
    "no tensor": ("R.bin", lambda path: torch.save({"R1": [1.0]}, path), "R1 is no tensor"),
    "twice": (
        "R.bin",
        lambda path: torch.save(
            dict.fromkeys(("layers.0.self_attn.R2", "model.layers.0.self_attn.R2"), torch.eye(3)), path
        ),
        "model.layers.0.self_attn.R2 comes twice",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, write, said = UNREADABLE[case]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=r"^run=/") as end:
        load_rotations(tmp_path / name, key="run")
    assert f"{tmp_path / name}: " in str(end.value)
    assert said in str(end.value)
    assert "\n" not in str(end.value)


@pytest.mark.parametrize("name", ["rotations.safetensors", "R.bin"])
def test_a_failed_write_leaves_what_was_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name

    def write(matrices: dict[str, Tensor]) -> None:
        save(path, matrices) if name.endswith("safetensors") else save_r_bin(path, matrices)

    write(rotations())
    before = path.read_bytes()

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(rotation_file.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write({"R1": torch.eye(4)})
    assert (path.read_bytes(), [found.name for found in tmp_path.iterdir()]) == (before, [name])


def test_files_are_as_readable_as_others(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_r_bin(tmp_path / "R.bin", rotations())
    path = save(tmp_path / "rotations.safetensors", rotations())
    assert {(tmp_path / name).stat().st_mode for name in ("other", "R.bin")} == {path.stat().st_mode}
    assert same(load_file(path), rotations())
