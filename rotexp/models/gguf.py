"""Models in GGUF files: dequantized by transformers, every tensor accounted for, the quantized ones with their type."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotexp.models.checkpoint import Shape

EXACT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""ggml types of tensors that were not quantized."""

READ_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError, struct.error)
"""What the GGUF reader and transformers raise for a file they cannot make sense of."""


@dataclass(frozen=True)
class GGUFWeights:
    """A GGUF file, dequantized by transformers to float32 when first read."""

    file: Path

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.file.parent, gguf_file=self.file.name, dtype=torch.float32, trust_remote_code=False
            )
        except READ_ERRORS as error:
            raise _unreadable(self.file, error) from None
        return dict(model.state_dict())

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of one tensor, on the host."""
        return self._tensors[name][rows]

    def release(self) -> None:
        """Let go of the dequantized tensors; the file is read again when one is asked for."""
        vars(self).pop("_tensors", None)

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}


def require_packages(*, name: str) -> None:
    """Check that GGUF can be read here.

    Raises:
        ValueError: a package is not installed.
    """
    for package in ("gguf", "sentencepiece"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"model={name}: reading GGUF needs {package}; pip install 'rotexp[gguf]'")


def read_gguf_config(file: Path) -> Any:
    """Return the Hugging Face config that transformers makes of a GGUF file's metadata.

    Raises:
        ValueError: it cannot be read, or transformers does not know its architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except READ_ERRORS as error:
        raise _unreadable(file, error) from None


def coarse_parameters(file: Path, parameters: Iterable[str], *, tied: str | None) -> dict[str, str]:
    """Return which parameters a GGUF file stores quantized, and the ggml type of each (`Q4_1`).

    transformers passes over tensors that it does not know and leaves parameters random that it does not find, so both
    are refused here.

    Args:
        parameters: the names of the model's parameters.
        tied: the parameter that may be absent (the head of a model with tied embeddings).

    Raises:
        ValueError: a parameter is not in the file, or a tensor of the file is no parameter's; each is named.
    """
    types, tensor_names = _read_names(file)
    stored = {name: tensor_names(name) for name in parameters}
    missing = [name for name, tensors in stored.items() if name != tied and not types.keys() >= set(tensors)]
    unknown = sorted(types.keys() - {tensor for tensors in stored.values() for tensor in tensors})
    named = (("missing", missing), ("not understood by transformers", unknown))
    if faults := [f"{fault}: {', '.join(names)}" for fault, names in named if names]:
        raise ValueError(f"model.path={file}: {'; '.join(faults)}; give the model as safetensors")
    held = {name: {types[tensor] for tensor in tensors if tensor in types} for name, tensors in stored.items()}
    grids = {name: "+".join(sorted(kinds - EXACT_TYPES)) for name, kinds in held.items()}
    return {name: grid for name, grid in grids.items() if grid}


def _read_names(file: Path) -> tuple[dict[str, str], Callable[[str], list[str]]]:
    """Return the type of each of the file's tensors, and a function from a parameter to its tensors' names."""
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

    try:
        reader = GGUFReader(file)
        architecture = reader.fields["general.architecture"].contents()
        num_layers = reader.fields[f"{architecture}.block_count"].contents()
        key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    except (*READ_ERRORS, StopIteration) as error:
        raise _unreadable(file, error) from None
    renamed = get_tensor_name_map(key, num_layers)

    def tensor_names(parameter: str) -> list[str]:
        stem, dot, suffix = parameter.rpartition(".")
        if suffix not in ("weight", "bias"):  # fused experts are parameters of a module without linears
            stem, dot, suffix = parameter, ".", "weight"
        parts = [stem.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        names = parts if stem.endswith("experts.gate_up_proj") else [stem]
        return [f"{renamed.get_name(name) or name}{dot}{suffix}" for name in names]

    return {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}, tensor_names


def _unreadable(file: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"model.path={file}: transformers cannot read this GGUF file ({reason}); give it as safetensors")
