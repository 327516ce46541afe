"""Where a model's weights come from: tensors by their checkpoint names, read whole or by rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class Weights(Protocol):
    """Tensors by name; picklable, so that ranks can be handed one."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        ...

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of the tensor called `name`, on the host, in its stored dtype."""
        ...


@dataclass(frozen=True)
class SafetensorsWeights:
    """One or several safetensors files; only what is asked for is read."""

    files: tuple[Path, ...]

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        return {name: file for file in self.files for name in _open(file).keys()}  # noqa: SIM118 (not a dict)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the files' headers."""
        return {name: tuple(_open(file).get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of one tensor, on the host."""
        part: Tensor = _open(self._file_of[name]).get_slice(name)[rows]
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model.path={file}: cannot be read as safetensors ({error}); fetch it again") from None


@dataclass(frozen=True)
class GGUFWeights:
    """A GGUF file, dequantized by transformers to float32 when first read."""

    file: Path

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.file.parent, gguf_file=self.file.name, dtype=torch.float32, trust_remote_code=False
        )
        return dict(model.state_dict())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of one tensor, on the host."""
        return self._tensors[name][rows]

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}


@dataclass(frozen=True)
class RandomWeights:
    """Normal weights with standard deviation 0.02 and unit norm gains, each tensor from a seed of its own name."""

    tensors: dict[str, tuple[int, ...]]
    seed: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
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


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be built: its Hugging Face config, its weights, its tokenizer's place.

    Attributes:
        identity: what to call it in files (`model id`).
        config: the `PretrainedConfig`.
        weights: its tensors.
        tokenizer: a folder, hub id or GGUF file that `load_tokenizer` reads.
        aliases: model names whose tensor is stored under another name (a tied head).
    """

    identity: str
    config: Any
    weights: Weights
    tokenizer: str
    revision: str | None = None
    aliases: dict[str, str] = field(default_factory=dict)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of the tensor of the model's parameter `name`, on the host."""
        return self.weights.read(self.aliases.get(name, name), rows)


def safetensors_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint folder, single or by index.

    Raises:
        ValueError: there are none, the index cannot be read, or a file it names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            held = "has weights, but not as safetensors" if any(folder.glob("*.bin")) else "holds no weights"
            raise ValueError(
                f"model.path={folder}: {held}; a folder with config.json and model.safetensors (or its index) is needed"
            )
        return (single,)
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


def check_names(
    expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]], *, identity: str, ignored: Iterable[str]
) -> None:
    """Compare a model's parameters with a checkpoint's tensors.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; each is named.
    """
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(name for name in stored.keys() - expected.keys() if not name.endswith(tuple(ignored)))
    misshapen = [
        f"{name} ({list(stored[name])} instead of {list(shape)})"
        for name, shape in sorted(expected.items())
        if name in stored and stored[name] != shape
    ]
    named = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
    faults = [f"{fault}: {', '.join(names)}" for fault, names in named if names]
    if faults:
        raise ValueError(f"model.path={identity}: tensors do not fit its config.json; {'; '.join(faults)}")
