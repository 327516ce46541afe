"""Files of weights, safetensors and those of `torch.save`: their tensors by name, read whole or by rows."""

from __future__ import annotations

import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rotexp.errors.wording import dtype_name, few
from rotexp.models.stored_model import Shape

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What safetensors calls the types in which unquantized weights are stored, and what torch calls them."""

BEGINNINGS = (
    (0, b"version https://git-lfs", "", "it is a Git LFS pointer; `git lfs pull` fetches what it stands for"),
    (0, b"GGUF", "GGUF", "it is a GGUF file, and must be named so"),
    (0, b"PK\x03\x04", "torch", "it is a file of torch.save, and must be named .bin"),
    (8, b"{", "safetensors", "it may be safetensors, and must be named so"),
    (0, b"<", "", "it is a web page"),
)
"""Files that are not what their names say: at which byte, by which bytes, which format, and what to tell people."""


@dataclass(frozen=True)
class Stored:
    """What a file says of one of its tensors, `dtype` in torch's words (`float32`) where torch has one."""

    file: Path
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class FileWeights(ABC):
    """One or several files of tensors; only what is asked for is read, and no file stays open.

    Attributes:
        files: a tensor that is in several of them is read from the last, unless it is assigned.
        assigned: the file of each tensor of which an index says it.
    """

    files: tuple[Path, ...]
    assigned: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def _header(self) -> dict[str, Stored]:
        of_file = {file: self._header_of(file) for file in self.files}
        header = {name: stored for found in of_file.values() for name, stored in found.items()}
        header |= {name: of_file[file][name] for name, file in self.assigned.items() if name in of_file[file]}
        if lacking := [name for name, file in self.assigned.items() if name not in of_file[file]]:
            raise ValueError(
                f"model.path={self.assigned[lacking[0]]}: lacks {few(lacking, most=1)}, which the index beside it says "
                f"lie there; fetch the model again"
            )
        return header

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor.

        Raises:
            ValueError: a file cannot be read, or lacks a tensor that was assigned to it.
        """
        return {name: stored.shape for name, stored in self._header.items()}

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of one tensor, on the host.

        Raises:
            ValueError: the file cannot be read any more.
        """
        return self._read_from(self._header[name].file, name, rows)

    def origin(self, name: str) -> str:
        """Return a tensor's name and its file's."""
        return f"{name} in {self._header[name].file.name}"

    def check_dtypes(self, needed: Iterable[str], *, identity: str) -> None:
        """Refuse tensors that hold no floating-point numbers of 16 bits or more, as quantized weights do not.

        Raises:
            ValueError: there are such; the first is named.
        """
        others = [name for name in needed if self._header[name].dtype not in FLOATS.values()]
        if others:
            more = f" and {len(others) - 1} more tensors" if len(others) > 1 else ""
            raise ValueError(
                f"model.path={identity}: {self.origin(others[0])} is stored in {self._header[others[0]].dtype}{more}, "
                f"but rotations are trained on weights in {', '.join(FLOATS.values())}; give the unquantized checkpoint"
            )

    def release(self) -> None:
        """Let go of the files' headers."""
        vars(self).pop("_header", None)

    @abstractmethod
    def _header_of(self, file: Path) -> dict[str, Stored]: ...

    @abstractmethod
    def _read_from(self, file: Path, name: str, rows: slice) -> Tensor: ...

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "assigned": self.assigned}


class SafetensorsWeights(FileWeights):
    """Files of safetensors."""

    def _header_of(self, file: Path) -> dict[str, Stored]:
        opened = _open(file)
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        return {name: Stored(file, tuple(part.get_shape()), _dtype(part.get_dtype())) for name, part in slices.items()}

    def _read_from(self, file: Path, name: str, rows: slice) -> Tensor:
        part: Tensor = _open(file).get_slice(name)[rows]
        return part


class PickledWeights(FileWeights):
    """State dicts of `torch.save`, mapped into memory; torch unpickles nothing but tensors."""

    def _header_of(self, file: Path) -> dict[str, Stored]:
        return {
            name: Stored(file, tuple(tensor.shape), dtype_name(tensor.dtype))
            for name, tensor in _unpickle(file).items()
        }

    def _read_from(self, file: Path, name: str, rows: slice) -> Tensor:
        return _unpickle(file)[name][rows]


def why_unreadable(file: Path, *, expected: str) -> str:
    """Return what a file seems to be instead of the format that is expected; empty where nothing is recognized."""
    try:
        with file.open("rb") as opened:
            beginning = opened.read(64)
    except OSError:
        return ""
    if not beginning:
        return "it is empty"
    others = (entry for entry in BEGINNINGS if entry[2] != expected)
    return next((what for start, known, _, what in others if beginning[start:].startswith(known)), "")


def _dtype(name: str) -> str:
    return FLOATS.get(name, name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        reason = why_unreadable(file, expected="safetensors") or str(error)
        raise ValueError(f"model.path={file}: cannot be read as safetensors ({reason}); fetch it again") from None


def _unpickle(file: Path) -> dict[str, Tensor]:
    remedy = "fetch it again, or convert it to safetensors"
    try:
        held: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        # Not torch's own words: they may advise to allow the file to run code.
        old = "" if zipfile.is_zipfile(file) else "not in the format of torch 1.6 and later"
        reason = why_unreadable(file, expected="torch") or old or type(error).__name__
        raise ValueError(f"model.path={file}: cannot be read as torch tensors ({reason}); {remedy}") from None
    if not isinstance(held, dict) or not all(_is_dense(tensor) for tensor in held.values()):
        raise ValueError(f"model.path={file}: must hold tensors by name and nothing else; save a state dict")
    return held


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
