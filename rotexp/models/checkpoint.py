"""Where a model's weights come from: tensors by their checkpoint names, read whole or by rows."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

Shape = tuple[int, ...]


class Weights(Protocol):
    """Tensors by name; picklable, so that ranks can be handed one."""

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor."""
        ...

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of the tensor called `name`, on the host, in its stored dtype."""
        ...

    def release(self) -> None:
        """Let go of what is held in memory; reading goes on."""
        ...


@dataclass(frozen=True)
class FileWeights(ABC):
    """One or several files of tensors; only what is asked for is read, and no file stays open."""

    files: tuple[Path, ...]

    @cached_property
    def _header(self) -> dict[str, tuple[Path, Shape]]:
        return {name: (file, shape) for file in self.files for name, shape in self._shapes_in(file).items()}

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor.

        Raises:
            ValueError: a file cannot be read.
        """
        return {name: shape for name, (_, shape) in self._header.items()}

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of one tensor, on the host."""
        return self._read_from(self._header[name][0], name, rows)

    def release(self) -> None:
        """Let go of the files' headers."""
        vars(self).pop("_header", None)

    @abstractmethod
    def _shapes_in(self, file: Path) -> dict[str, Shape]: ...

    @abstractmethod
    def _read_from(self, file: Path, name: str, rows: slice) -> Tensor: ...

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files}


class SafetensorsWeights(FileWeights):
    """Files of safetensors."""

    def _shapes_in(self, file: Path) -> dict[str, Shape]:
        opened = _open(file)
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (not a dict)

    def _read_from(self, file: Path, name: str, rows: slice) -> Tensor:
        part: Tensor = _open(file).get_slice(name)[rows]
        return part


class PickledWeights(FileWeights):
    """State dicts of `torch.save`, mapped into memory; torch unpickles nothing but tensors."""

    def _shapes_in(self, file: Path) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in _unpickle(file).items()}

    def _read_from(self, file: Path, name: str, rows: slice) -> Tensor:
        return _unpickle(file)[name][rows]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model.path={file}: cannot be read as safetensors ({error}); fetch it again") from None


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        held: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        # Not torch's own words: they may advise to allow the file to run code.
        reason = f"cannot be read as torch tensors ({type(error).__name__})"
        raise ValueError(f"model.path={file}: {reason}; fetch it again, or convert it to safetensors") from None
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise ValueError(f"model.path={file}: must hold tensors by name and nothing else; save a state dict")
    return held


@dataclass(frozen=True)
class RandomWeights:
    """Normal weights with standard deviation 0.02 and unit norm gains, each tensor from a seed of its own name."""

    tensors: dict[str, Shape]
    seed: int

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor."""
        return self.tensors

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of one tensor; the same bits whichever rows are asked for."""
        shape = self.tensors[name]
        if len(shape) == 1:
            return torch.ones(shape)[rows]
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        return torch.randn(shape, generator=generator)[rows] * 0.02

    def release(self) -> None:
        """Do nothing: nothing is held."""


@dataclass(frozen=True)
class ExpertStack:
    """A parameter (experts, *shape) whose checkpoint stores every expert in tensors of its own.

    Attributes:
        experts: for each row of dimension 0, the stored tensors that make it, concatenated along their dimension 0.
        shape: the shape of one row.
    """

    experts: tuple[tuple[str, ...], ...]
    shape: Shape

    def stored_shapes(self) -> dict[str, Shape]:
        """Return the shape that each stored tensor must have."""
        length, *rest = self.shape
        return {name: (length // len(parts), *rest) for parts in self.experts for name in parts}

    def read(self, weights: Weights, rows: slice) -> Tensor:
        """Return rows (rows, *shape), on the host; no other expert's tensors are read."""
        chosen = self.experts[rows]
        if not chosen:
            return torch.empty(0, *self.shape)
        return torch.stack([torch.cat([weights.read(name) for name in parts]) for parts in chosen])


Source = str | ExpertStack
"""Where a parameter lies in a checkpoint: the name of one stored tensor, or a stack of several."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be built: its Hugging Face config, its weights, its tokenizer's place.

    Attributes:
        identity: what to call it in files (`model id`).
        config: the `PretrainedConfig` of its language model.
        weights: its tensors.
        tokenizer: a folder, hub id or GGUF file that `load_tokenizer` reads.
        revision: the commit of the hub that it was fetched at.
        aliases: parameters that are not stored under their own names, and where they are (a tied head, experts).
        dtype: what its config says, or else its embedding is stored in.
        coarse: parameters that were stored quantized and so lie on a grid, and the type of it (GGUF: `Q4_1`).
    """

    identity: str
    config: Any
    weights: Weights
    tokenizer: str
    revision: str | None = None
    aliases: dict[str, Source] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    coarse: dict[str, str] = field(default_factory=dict)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of the model's parameter `name`, on the host."""
        source = self.source(name)
        return self.weights.read(source, rows) if isinstance(source, str) else source.read(self.weights, rows)

    def source(self, name: str) -> Source:
        """Return where the model's parameter `name` lies."""
        return self.aliases.get(name, name)

    def coarse_counts(self) -> dict[str, int]:
        """Return how many parameters lie on a grid of each type."""
        return dict(sorted(Counter(self.coarse.values()).items()))


def folder_weights(folder: Path) -> FileWeights:
    """Return the weights of a checkpoint folder, single or by index; safetensors where there are both kinds.

    Raises:
        ValueError: there are none, the index cannot be read, or a file it names is missing.
    """
    if files := safetensors_files(folder):
        return SafetensorsWeights(files)
    if files := _files(folder, "pytorch_model.bin"):
        return PickledWeights(files)
    allowed = "model.safetensors or pytorch_model.bin (or the index of either)"
    raise ValueError(f"model.path={folder}: holds no weights; a folder with config.json and {allowed} is needed")


def safetensors_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint folder, single or by index; none if it has none.

    Raises:
        ValueError: the index cannot be read, or a file it names is missing.
    """
    return _files(folder, "model.safetensors")


def _files(folder: Path, single: str) -> tuple[Path, ...]:
    index = folder / f"{single}.index.json"
    if not index.is_file():
        return (folder / single,) if (folder / single).is_file() else ()
    files = tuple(sorted({folder / name for name in _indexed(index)}))
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"model.path={folder}: {', '.join(absent)} of its index is missing; fetch the model again")
    return files


def _indexed(index: Path) -> list[str]:
    try:
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"model.path={index}: names no files of weights ({reason}); fetch the model again") from None


def check_names(expected: dict[str, Shape], stored: dict[str, Shape], *, identity: str, ignored: Iterable[str]) -> None:
    """Compare the tensors a model needs with those of its checkpoint.

    Args:
        ignored: patterns of names that a checkpoint may hold although no parameter is called so.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; each is named.
    """
    missing = sorted(expected.keys() - stored.keys())
    patterns = [re.compile(pattern) for pattern in ignored]
    unneeded = sorted(stored.keys() - expected.keys())
    unexpected = [name for name in unneeded if not any(pattern.search(name) for pattern in patterns)]
    misshapen = [
        f"{name} ({list(stored[name])} instead of {list(shape)})"
        for name, shape in sorted(expected.items())
        if name in stored and stored[name] != shape
    ]
    named = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
    faults = [f"{fault}: {', '.join(names)}" for fault, names in named if names]
    if faults:
        raise ValueError(f"model.path={identity}: tensors do not fit its config.json; {'; '.join(faults)}")
