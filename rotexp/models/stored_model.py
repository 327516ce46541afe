"""A model that can be built: its config, and its weights by their names, read whole or by rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
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

    def origin(self, name: str) -> str:
        """Return where the tensor called `name` lies, for messages: its own name there, and the file's."""
        ...

    def release(self) -> None:
        """Let go of what is held in memory; reading goes on."""
        ...


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

    def origin(self, name: str) -> str:
        """Return that it was drawn."""
        return f"{name} as drawn"

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

    def renamed(self, names: Mapping[str, str]) -> ExpertStack:
        """Return the stack with its tensors under other names."""
        return ExpertStack(tuple(tuple(names[part] for part in parts) for parts in self.experts), self.shape)

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
class StoredModel:
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

    def stored_parts(self, name: str, rows: slice) -> Iterator[tuple[str, slice]]:
        """Yield the stored tensors that `read` reads for these rows of a parameter, and which rows of each."""
        source = self.source(name)
        if isinstance(source, str):
            yield source, rows
        else:
            yield from ((part, slice(None)) for parts in source.experts[rows] for part in parts)

    def coarse_counts(self) -> dict[str, int]:
        """Return how many parameters lie on a grid of each type."""
        return dict(sorted(Counter(self.coarse.values()).items()))
