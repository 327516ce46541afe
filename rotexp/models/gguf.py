"""Models in GGUF files: dequantized tensor by tensor, all of them accounted for, the quantized ones with their type."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rotexp.errors.library import refused
from rotexp.errors.wording import few
from rotexp.models.stored_model import Shape
from rotexp.models.weight_files import why_unreadable

EXACT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""ggml types of tensors that were not quantized."""


@dataclass(frozen=True)
class GGUFWeights:
    """A GGUF file whose tensors are dequantized to float32 as transformers does it, each when it is read.

    Attributes:
        parts: the tensors of the file that make each parameter, in their order.
        stored: the shape of each parameter that is stored.
        coarse: the parameters that are stored quantized, and the ggml type of each (`Q4_1`).
        architecture: what the file says of its model.
        config: the Hugging Face config's values; transformers' processors of tensors find counts of heads there.
    """

    file: Path
    parts: dict[str, tuple[str, ...]]
    stored: dict[str, Shape]
    coarse: dict[str, str]
    architecture: str
    config: dict[str, Any]

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        """What the reader says of each tensor; the values stay in the file, mapped into memory."""
        return {tensor.name: tensor for tensor in _open(self.file).tensors}

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every parameter that is stored."""
        return self.stored

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of one parameter, float32, on the host; the rest of it is dequantized and dropped.

        Raises:
            ValueError: it does not come out in its shape.
        """
        whole = self._dequantize(name)
        if tuple(whole.shape) != self.stored[name]:
            raise _unreadable(self.file, f"{name} comes out as {list(whole.shape)}, not {list(self.stored[name])}")
        return torch.from_numpy(np.asarray(whole[rows]).copy())

    def _dequantize(self, name: str) -> Any:
        """Return one whole parameter, as transformers orders it (Llama's queries and keys lie permuted in a file)."""
        from gguf import dequantize
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        kind: Any = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)
        processor = kind(config=self.config)
        found: dict[str, Any] = {}
        for part in self.parts[name]:
            tensor = self._tensors[part]
            processed = processor.process(
                weights=dequantize(tensor.data, tensor.tensor_type),
                name=part,
                tensor_key_mapping={part.removesuffix(".weight"): name},
                parsed_parameters={"tensors": found},
            )
            if processed.name is not None:  # else it is among what was found: a half of fused experts
                found[name] = processed.weights
        return found[name]

    def origin(self, name: str) -> str:
        """Return the tensors of the file that make a parameter, and the file's name."""
        return f"{' and '.join(self.parts[name])} in {self.file.name}"

    def release(self) -> None:
        """Let go of the file; it is opened again when a tensor is asked for."""
        vars(self).pop("_tensors", None)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_tensors"}


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

    with _reading(file):
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)


def open_gguf(
    file: Path, parameters: Mapping[str, Shape], *, tied: str | None, config: Mapping[str, Any]
) -> GGUFWeights:
    """Find the tensors of every parameter in a GGUF file; of its values none are read but a row of each type.

    transformers passes over tensors that it does not know and leaves parameters random that it does not find, so both
    are refused here.

    Args:
        parameters: the names and shapes of the model's parameters.
        tied: the parameter that may be absent (the head of a model with tied embeddings).
        config: the Hugging Face config's values.

    Raises:
        ValueError: a parameter is not in the file, or a tensor of the file is no parameter's, the first are named; or
            its values are of a type that cannot be dequantized.
    """
    reader = _open(file)
    architecture, tensor_names = _read_names(file, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    parts = {name: tensor_names(name) for name in parameters}
    missing = [name for name, names in parts.items() if name != tied and not tensors.keys() >= set(names)]
    unknown = sorted(tensors.keys() - {tensor for names in parts.values() for tensor in names})
    named = (("missing", missing), ("not understood by transformers", unknown))
    if faults := [f"{fault}: {few(names)}" for fault, names in named if names]:
        raise ValueError(f"model.path={file}: {'; '.join(faults)}; give the model as safetensors")
    _check_types(file, tensors.values())
    held = {name: [tensors[part] for part in names] for name, names in parts.items() if tensors.keys() >= set(names)}
    return GGUFWeights(
        file,
        {name: parts[name] for name in held},
        {name: _shape(of, parameters[name]) for name, of in held.items()},
        {name: grid for name, of in held.items() if (grid := _grid(of))},
        architecture,
        dict(config),
    )


def _check_types(file: Path, tensors: Iterable[Any]) -> None:
    """Dequantize a row of each type, so that none fails later."""
    from gguf import dequantize

    with _reading(file):
        for tensor in {tensor.tensor_type: tensor for tensor in tensors}.values():
            dequantize(tensor.data[:1], tensor.tensor_type)


def _shape(tensors: list[Any], expected: Shape) -> Shape:
    """Return a parameter's shape if it is stored in as many numbers, or else that of the first tensor as it is."""
    stored = [tuple(int(size) for size in reversed(tensor.shape)) for tensor in tensors]
    return expected if sum(map(math.prod, stored)) == math.prod(expected) else stored[0]


def _grid(tensors: list[Any]) -> str:
    """Return the types in which tensors are stored quantized; empty where none are."""
    return "+".join(sorted({tensor.tensor_type.name for tensor in tensors} - EXACT_TYPES))


def _open(file: Path) -> Any:
    from gguf import GGUFReader

    with _reading(file):
        return GGUFReader(file)


def _read_names(file: Path, reader: Any) -> tuple[str, Callable[[str], tuple[str, ...]]]:
    """Return a file's architecture, and a function from a parameter to its tensors' names."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    with _reading(file):
        architecture = reader.fields["general.architecture"].contents()
        num_layers = reader.fields[f"{architecture}.block_count"].contents()
        key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    renamed = get_tensor_name_map(key, num_layers)

    def tensor_names(parameter: str) -> tuple[str, ...]:
        stem, dot, suffix = parameter.rpartition(".")
        if suffix not in ("weight", "bias"):  # fused experts are parameters of a module without linears
            stem, dot, suffix = parameter, ".", "weight"
        parts = [stem.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        names = parts if stem.endswith("experts.gate_up_proj") else [stem]
        return tuple(f"{renamed.get_name(name) or name}{dot}{suffix}" for name in names)

    return architecture, tensor_names


def _reading(file: Path) -> AbstractContextManager[None]:
    """Refuse a file of which the GGUF reader or transformers cannot make sense."""
    return refused(lambda reason: str(_unreadable(file, reason)))


def _unreadable(file: Path, reason: str) -> ValueError:
    reason = why_unreadable(file, expected="GGUF") or reason
    return ValueError(f"model.path={file}: transformers cannot read this GGUF file ({reason}); give it as safetensors")
