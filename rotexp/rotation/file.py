"""Files of rotations: our `rotations.safetensors`, and `R.bin`, which the field's other tools read and write."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rotexp.errors.wording import dtype_name, few_faults
from rotexp.orthogonal.stiefel import orthogonality_error, polar_projection
from rotexp.rotation.bank import RotationBank
from rotexp.sharding.local_rows import largest_magnitude

ROUNDING = 1e-5
"""Largest max|R Rᵀ − I| of a matrix that is taken bit for bit; float32 rounding stays below it."""

LIMIT = 1e-2
"""Largest max|R Rᵀ − I| of a matrix that is taken at all: what rounding to bfloat16 does to a Hadamard matrix."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What a matrix may be stored in."""

R_BIN_KEY = re.compile(r"(?:.+\.)?(\d+)\.self_attn\.R2")
OUR_KEY = re.compile(r"R2_(\d+)")
STRUCTURE = ("format", "rotations", "online")
"""The metadata keys that describe the matrices; the others are facts about the run."""


@dataclass(frozen=True)
class LoadedRotations:
    """What a file of rotations holds.

    Attributes:
        path: the file.
        matrices: `R1` and `R2_i`: (n, n), or (blocks, n, n) for a block-diagonal one; on the host, dtype as stored.
        placements: for each matrix, where it acts, in words; None where the file does not say.
        online: order of each Hadamard transform that acts online beside them; None where the file does not say.
        facts: further metadata: model, seed, config digest.
    """

    path: Path
    matrices: dict[str, Tensor]
    placements: dict[str, str] | None = None
    online: dict[str, int] | None = None
    facts: dict[str, str] = field(default_factory=dict)


def save_rotations(
    path: Path,
    rotations: Mapping[str, Tensor],
    *,
    placements: Mapping[str, str],
    online: Mapping[str, int],
    facts: Mapping[str, Any],
) -> None:
    """Write rotations (n, n) or (blocks, n, n) as safetensors, whole or not at all.

    Args:
        placements: where each rotation acts.
        online: order of each Hadamard transform that stays online; it is constructed, not stored.
        facts: further metadata: seed, config digest, model.
    """
    described = {
        name: {"placement": placements[name], "shape": list(matrix.shape), "dtype": dtype_name(matrix.dtype)}
        for name, matrix in rotations.items()
    }
    texts = {key: str(value) for key, value in facts.items()}
    metadata = {"format": "rotexp", "rotations": json.dumps(described), "online": json.dumps(dict(online)), **texts}
    with replacing(path) as aside:
        save_file({name: matrix.cpu().contiguous() for name, matrix in rotations.items()}, aside, metadata=metadata)


def save_r_bin(path: Path, rotations: Mapping[str, Tensor], *, layers: str = "model.layers") -> None:
    """Write rotations in the layout of `R.bin`, whole or not at all; the same rotations give the same bytes.

    Args:
        rotations: `R1` and `R2_i`, in any dtype; (blocks, n, n) is written as the dense (blocks * n, blocks * n).
        layers: the name of the decoder layers, from the model's root.

    Raises:
        ValueError: a rotation has no place in that layout.
    """
    stored = {_r_bin_key(name, layers): _dense(matrix).cpu().contiguous() for name, matrix in rotations.items()}
    content = io.BytesIO()  # torch.save would put the name of the file aside into the file
    torch.save(stored, content)
    with replacing(path) as aside:
        aside.write_bytes(content.getbuffer())


def _r_bin_key(name: str, layers: str) -> str:
    if name == "R1":
        return name
    if matched := OUR_KEY.fullmatch(name):
        return f"{layers}.{matched[1]}.self_attn.R2"
    raise ValueError(f"rotation {name}: R.bin holds R1 and each layer's R2 only; export rotations.safetensors instead")


def _dense(matrix: Tensor) -> Tensor:
    blocks = matrix.detach()
    return blocks if blocks.ndim == 2 else _block_diagonal(blocks)


def _block_diagonal(blocks: Tensor) -> Tensor:
    """Return the dense (blocks * n, blocks * n) matrix of blocks (blocks, n, n)."""
    num_blocks, order, _ = blocks.shape
    dense = blocks.new_zeros(num_blocks, order, num_blocks, order)
    index = torch.arange(num_blocks, device=blocks.device)
    dense[index, :, index, :] = blocks
    return dense.reshape(num_blocks * order, num_blocks * order)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` that takes its place once it is complete and on the disk."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        aside.chmod(0o666 & ~_umask())
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load_rotations(path: Path, *, key: str = "rotation.path") -> LoadedRotations:
    """Read a file of rotations; nothing in it is run.

    Args:
        path: a `.safetensors` that rotexp wrote, or an `R.bin` (`.bin`, `.pt`, `.pth`).
        key: the configuration's key that named the file, for messages.

    Raises:
        ValueError: no such file, another suffix, damaged, not what it should be, or more than tensors.
    """
    where = f"{key}={path}"
    if path.is_dir():
        raise ValueError(f"{where}: is a folder; name a file in it, such as rotations.safetensors")
    if not path.is_file():
        raise ValueError(f"{where}: no such file; name a rotations.safetensors or R.bin")
    if path.suffix == ".safetensors":
        return _load_safetensors(path, where)
    if path.suffix in (".bin", ".pt", ".pth"):
        return LoadedRotations(path, _our_names(_load_tensors(path, where), where))
    raise ValueError(f"{where}: must end in .safetensors, or in .bin, .pt or .pth for the layout of R.bin; rename it")


def _load_safetensors(path: Path, where: str) -> LoadedRotations:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            matrices = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{where}: cannot be read as safetensors ({error}); fetch or export it again") from None
    if metadata.get("format") != "rotexp":
        raise ValueError(f"{where}: was not written by rotexp (its metadata say nothing of rotations); name another")
    try:
        placements = {name: str(entry["placement"]) for name, entry in json.loads(metadata["rotations"]).items()}
        online = {name: int(order) for name, order in json.loads(metadata["online"]).items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: its metadata cannot be read ({reason}); name another file") from None
    facts = {name: text for name, text in metadata.items() if name not in STRUCTURE}
    return LoadedRotations(path, matrices, placements, online, facts)


def _load_tensors(path: Path, where: str) -> dict[Any, Any]:
    """Unpickle a dict onto the host, under torch's allow-list."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols; the answer is one line
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{where}: holds more than tensors, or is no file of torch; name another file") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{where}: cannot be read by torch ({reason}); fetch or export it again") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{where}: holds a {type(loaded).__name__}, not matrices by name; name another file")
    return loaded


def _our_names(stored: dict[Any, Any], where: str) -> dict[str, Tensor]:
    """Translate the keys of `R.bin`, and check that they lead to tensors."""
    matrices: dict[str, Tensor] = {}
    faults = []
    for key, value in stored.items():
        matched = R_BIN_KEY.fullmatch(str(key))
        name = f"R2_{int(matched[1])}" if matched else str(key)
        if not matched and key != "R1":
            faults.append(f"{key} is neither R1 nor <layers>.i.self_attn.R2")
        elif not isinstance(value, Tensor):
            faults.append(f"{key} is no tensor")
        elif name in matrices:
            faults.append(f"{key} comes twice")
        else:
            matrices[name] = value.detach()
    if faults:
        raise ValueError(f"{where}: {few_faults(faults)}; name a file of rotations only")
    return matrices


def assign_rotations(
    bank: RotationBank,
    loaded: LoadedRotations,
    *,
    model: str,
    placements: Mapping[str, str],
    online: Mapping[str, int],
    key: str = "rotation.path",
) -> dict[str, float]:
    """Check loaded rotations against a model, and let its bank hold them; nothing is assigned if anything is wrong.

    Matrices within `ROUNDING` of orthogonal are taken as they are, in the bank's dtype. Coarser ones, such as bfloat16
    files hold, are replaced by the nearest orthogonal matrices, for only those leave the float model as it is.

    Args:
        model: what the model is called in files.
        placements, online: the model's own, as in `save_rotations`.

    Returns:
        max|R Rᵀ − I| in the file of each matrix that was replaced.

    Raises:
        ValueError: the file belongs to another model, or to other placements or online transforms; a matrix is missing,
            unexpected, misshapen, not finite or not orthogonal. The first faults are named.
    """
    where = f"{key}={loaded.path}"
    if faults := _foreign(loaded, model=model, placements=placements, online=online):
        raise ValueError(f"{where}: {'; '.join(faults)}; name a file of the same model and rotation group")
    matrices, errors, faults = {}, {}, _misnamed(loaded.matrices, dict(bank.items()))
    for name, target in bank.items():
        if name in loaded.matrices:
            matrices[name], errors[name], fault = _fitted(loaded.matrices[name], target)
            faults += [f"{name} {fault}"] if fault else []
    if faults:
        raise ValueError(f"{where}: {few_faults(faults)}; name a file of rotations of this model")
    bank.assign({name: matrix.to(bank[name].dtype) for name, matrix in matrices.items()})
    return {name: error for name, error in errors.items() if error > ROUNDING}


def _foreign(
    loaded: LoadedRotations, *, model: str, placements: Mapping[str, str], online: Mapping[str, int]
) -> list[str]:
    """Say in which ways a file is of another model, as far as it tells."""
    faults = []
    if loaded.facts.get("model", model) != model:
        faults.append(f"its rotations are of model {loaded.facts['model']}, not {model}")
    theirs = loaded.placements or {}
    for name in sorted(theirs.keys() & placements.keys()):
        if theirs[name] != placements[name]:
            faults.append(f"its {name} acts at {theirs[name]}, not at {placements[name]}")
    if loaded.online is not None and loaded.online != dict(online):
        faults.append(f"it was trained with {_online(loaded.online)}, and here is {_online(online)}")
    return faults


def _online(orders: Mapping[str, int]) -> str:
    return ", ".join(f"{name} of order {order} online" for name, order in orders.items()) or "no online transform"


def _misnamed(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    missing, unexpected = expected.keys() - loaded.keys(), loaded.keys() - expected.keys()
    return [f"{name} is missing" for name in sorted(missing)] + [
        f"{name} has no place in this model" for name in sorted(unexpected)
    ]


def _fitted(matrix: Tensor, target: Tensor) -> tuple[Tensor, float, str]:
    """Return the matrix in the target's shape and orthogonal, how far it was from that, and what is wrong with it."""
    if matrix.dtype not in FLOATS:
        return matrix, 0.0, f"is {dtype_name(matrix.dtype)}, not one of {', '.join(map(dtype_name, FLOATS))}"
    if not math.isfinite(largest := largest_magnitude(matrix)):
        return matrix, 0.0, f"holds {largest}"
    shaped = _shaped(matrix, target.shape)
    if shaped is None:
        shapes = f"is {list(matrix.shape)} instead of {list(target.shape)}"
        same_order = matrix.ndim == 2 and target.ndim == 3 and len(matrix) == target.shape[0] * target.shape[1]
        return matrix, 0.0, f"{shapes}{' and not block-diagonal' if same_order else ''}"
    error = float(torch.stack(orthogonality_error(shaped)).max())
    if not error <= LIMIT:
        return matrix, error, f"is not orthogonal (max|R Rᵀ − I| = {error:.1e}, at most {LIMIT:.0e})"
    return (shaped if error <= ROUNDING else polar_projection(shaped.double())), error, ""


def _shaped(matrix: Tensor, shape: torch.Size) -> Tensor | None:
    """Return the matrix in a shape: itself, or the blocks (blocks, n, n) of a dense one that is block-diagonal."""
    if matrix.shape == shape:
        return matrix
    if len(shape) != 3 or matrix.shape != (shape[0] * shape[1],) * 2:
        return None
    num_blocks, order, _ = shape
    blocks = matrix.reshape(num_blocks, order, num_blocks, order).diagonal(dim1=0, dim2=2).movedim(-1, 0).contiguous()
    return blocks if torch.equal(_block_diagonal(blocks), matrix) else None
