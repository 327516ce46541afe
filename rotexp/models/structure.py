"""Fit a checkpoint to its model: the structure, built without memory, and where each parameter's values lie."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rotexp.errors.library import refused
from rotexp.errors.wording import few
from rotexp.models.arch import find_spec, untie
from rotexp.models.gguf import GGUFWeights
from rotexp.models.hf_config import language_config
from rotexp.models.names import check_names, find_sources, language_tensors, plain_names, stored_shapes
from rotexp.models.stored_model import Shape, Source, StoredModel, Weights
from rotexp.models.weight_files import FileWeights

COMPUTED_TENSORS = r"rotary_emb\.inv_freq$"
"""Buffers that old checkpoints of every family carry and models compute; transformers knows of further ones."""

COMPARED_ROWS = 2**14
"""How many rows of two tensors are in memory at once while they are compared."""


@dataclass(frozen=True)
class Structure:
    """What is known of a model before its weights are.

    Attributes:
        config: the Hugging Face config of its language model.
        whole: the config that holds it, the same one for a text model.
        shapes: of its parameters.
        base: its `base_model_prefix`.
        embedding, head: names of the parameters that may be tied.
        ignored: patterns of the names of tensors that checkpoints of this family hold without need.
    """

    config: Any
    whole: Any
    shapes: dict[str, Shape]
    base: str
    embedding: str
    head: str
    ignored: tuple[str, ...]

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, where a checkpoint has no head of its own."""
        return any(getattr(config, "tie_word_embeddings", False) for config in (self.config, self.whole))

    @property
    def nested(self) -> bool:
        """Whether it is the language model of a multimodal checkpoint."""
        return self.config is not self.whole


def read_structure(whole: Any, *, where: str) -> Structure:
    """Build the language model of a config, without memory.

    Args:
        where: what every refusal begins with: the key, and the file that holds the config.

    Raises:
        ValueError: it cannot be built, or its architecture is not supported.
    """
    try:
        return _read_structure(whole)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_structure(whole: Any) -> Structure:
    config = language_config(whole)
    kind = f"model_type={config.model_type}"
    with refused(lambda reason: f"{kind}: transformers cannot build it from its config ({reason}); choose another"):
        model = build_network(config, dtype=torch.float32)
    with refused(
        lambda reason: f"{kind}: is not built as any supported ({reason}); choose another", passing=(ValueError,)
    ):
        find_spec(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    embedding, head = (names[module.weight] for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    ignored = (COMPUTED_TENSORS, *(model._keys_to_ignore_on_load_unexpected or ()))
    return Structure(config, whole, shapes, model.base_model_prefix, embedding, head, ignored)


def fit(
    structure: Structure,
    weights: Weights,
    *,
    identity: str,
    tokenizer: Path,
    revision: str | None = None,
) -> StoredModel:
    """Find every parameter among the weights.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape or no floating-point numbers.
    """
    shapes = weights.shapes()
    names = plain_names(
        shapes,
        structure.shapes,
        base=structure.base,
        nested=structure.nested,
        embedding=structure.embedding,
        identity=identity,
    )
    stored = {plain: shapes[name] for plain, name in names.items()}
    sources = find_sources(structure.shapes, stored, base=structure.base, nested=structure.nested)
    if structure.tied and sources[structure.head] not in stored:
        sources[structure.head] = sources[structure.embedding]
    needed = stored_shapes(structure.shapes, sources)
    if structure.nested:
        stored = language_tensors(stored, needed, embedding=str(sources[structure.embedding]))
    check_names(needed, stored, identity=identity, ignored=structure.ignored)
    if isinstance(weights, FileWeights):
        weights.check_dtypes((names[plain] for plain in needed), identity=identity)
    sources = {name: _renamed(source, names) for name, source in sources.items()}
    aliases: dict[str, Source] = {name: source for name, source in sources.items() if source != name}
    checkpoint = StoredModel(identity, structure.config, weights, str(tokenizer), revision, aliases)
    if structure.tied and _holds_equal(checkpoint, structure.head, structure.embedding, structure.shapes):
        aliases[structure.head] = sources[structure.embedding]
    if isinstance(weights, GGUFWeights):
        return replace(checkpoint, dtype=torch.float32, coarse=weights.coarse)
    return replace(checkpoint, dtype=_own_dtype(structure, checkpoint))


def _renamed(source: Source, names: Mapping[str, str]) -> Source:
    return names[source] if isinstance(source, str) else source.renamed(names)


def _holds_equal(checkpoint: StoredModel, name: str, other: str, shapes: dict[str, Shape]) -> bool:
    """Return whether two parameters have the same values: files of `torch.save` store a tied one twice."""
    if checkpoint.source(name) == checkpoint.source(other):
        return True
    if shapes[name] != shapes[other]:
        return False
    starts = range(0, shapes[name][0], COMPARED_ROWS)
    parts = (slice(start, start + COMPARED_ROWS) for start in starts)
    return all(torch.equal(checkpoint.read(name, part), checkpoint.read(other, part)) for part in parts)


def _own_dtype(structure: Structure, checkpoint: StoredModel) -> torch.dtype:
    for config in (structure.config, structure.whole):
        stated = getattr(config, "dtype", None)
        dtype = getattr(torch, stated, None) if isinstance(stated, str) else stated
        if isinstance(dtype, torch.dtype):
            return dtype
    return checkpoint.read(structure.embedding, slice(0, 1)).dtype


class _Unfilled(TorchFunctionMode):
    """Puts what is made without values (`torch.empty`) on the meta device from the beginning.

    accelerate moves parameters there once they are made, each with its memory until then: gigabytes for a stack of
    experts. Buffers are computed from values, which stay real.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return function(*args, **options)


def build_network(config: Any, *, dtype: torch.dtype) -> Any:
    """Build the causal model of a Hugging Face config on the meta device, buffers real, embedding and head untied.

    Raises:
        ValueError: it has a buffer of which nothing says what it holds.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False), _Unfilled():
        auto: Any = AutoModelForCausalLM
        # A copy, since the model's config is changed below and by placement, and a config is built from more than once.
        model = auto.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    if unfilled := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(f"buffers are made without values: {few(unfilled)}")
    if model.get_output_embeddings() is not None:
        untie(model)
    return model.eval().requires_grad_(False)
