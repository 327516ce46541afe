"""Save a model as a folder that plain transformers reads: complete, or absent."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from rotexp.errors.wording import dtype_name, few_faults
from rotexp.files.folders import complete_folder
from rotexp.files.reading import UnreadableError, read_json
from rotexp.models.hf_config import QUANTIZED_KEYS
from rotexp.models.stored_model import StoredModel
from rotexp.models.tokenizer import tokenizer_files
from rotexp.models.weight_folder import folder_weights

MANIFEST_FILE = "rotexp_manifest.json"
CLIP_RATIOS_FILE = "clip_ratios.safetensors"
GENERATION_FILE = "generation_config.json"
CODE_KEY = "auto_map"
"""Names code that lies beside the source; it is not part of what is saved."""


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Any,
    *,
    dtype: torch.dtype,
    tokenizer: Any = None,
    generation: Any = None,
    copied: Mapping[str, Path] | None = None,
    manifest: Mapping[str, Any] | None = None,
    clip_ratios: Mapping[str, Tensor] | None = None,
    source_shapes: Mapping[str, tuple[int, ...]] | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a Hugging Face checkpoint, complete or not at all.

    Args:
        folder: does not exist, or is empty.
        tensors: every parameter and buffer of the plain model by its name there; an untied head is among them.
        config: the source's `PretrainedConfig`; it is not changed.
        dtype: in which weights are stored, but for those that the model itself keeps in float32.
        tokenizer: a Hugging Face tokenizer to write, where there are no files of it to copy.
        generation: a `GenerationConfig` to write, where there is no file of it to copy. Without either, transformers
            makes one from the config.
        copied: files that are copied byte for byte, by their names in the folder.
        manifest: becomes `rotexp_manifest.json`.
        clip_ratios: learned for the quantizer of each weight, (..., outputs, groups); become `clip_ratios.safetensors`.
        source_shapes: shapes in the source's files; those of the same names must come out equal.
        max_shard_size: of one file of weights.

    Raises:
        ValueError: the folder is taken, names or shapes are not those of the plain model, or a weight is too large for
            the dtype.
        OSError: writing failed.
    """
    model = plain_model(config, dtype=dtype)
    check_fits(model, tensors)
    tied = _tied_head(model, config, tensors)
    model.config.tie_word_embeddings = tied is not None
    stored = _stored_tensors(model, {name: tensor for name, tensor in tensors.items() if name != tied})
    with complete_folder(folder, key="export.path") as aside:
        _write_weights(model, stored, aside, max_shard_size=max_shard_size)
        _check_shapes(aside, source_shapes or {})
        for companion in (tokenizer, generation):
            if companion is not None:
                companion.save_pretrained(aside)
        for name, file in (copied or {}).items():
            (aside / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, aside / name)
        if manifest is not None:
            (aside / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if clip_ratios:
            save_file(dict(clip_ratios), aside / CLIP_RATIOS_FILE)


def plain_model(config: Any, *, dtype: torch.dtype) -> Any:
    """Build what `AutoModelForCausalLM` makes of a clean copy of the config, untied and without memory."""
    from transformers import AutoModelForCausalLM

    clean = copy.deepcopy(config)
    for name in (*QUANTIZED_KEYS, CODE_KEY):
        if hasattr(clean, name):
            delattr(clean, name)
    clean._attn_implementation = None
    clean.tie_word_embeddings = False
    with init_empty_weights(include_buffers=False):
        auto: Any = AutoModelForCausalLM
        return auto.from_config(clean, dtype=dtype, trust_remote_code=False)


def check_fits(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with what the plain model's state dict holds.

    Raises:
        ValueError: one is missing, unexpected or of another shape; each is named.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    faults = [f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    faults += [f"{name} has no place there" for name in sorted(tensors.keys() - expected.keys())]
    faults += [
        f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if faults:
        raise ValueError(f"{type(model).__name__}: the merged model does not fit it: {few_faults(faults)}")


def _tied_head(model: Any, config: Any, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the head's weight if the source ties it to the embedding, and they are equal still."""
    if not getattr(config, "tie_word_embeddings", False):
        return None
    names = {module: name for name, module in model.named_modules()}
    head, embedding = (names.get(module) for module in (model.get_output_embeddings(), model.get_input_embeddings()))
    if head is None or embedding is None:
        return None
    equal = torch.equal(tensors[f"{head}.weight"], tensors[f"{embedding}.weight"])
    return f"{head}.weight" if equal else None


def _stored_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the model's dtypes, on the host and each with a storage of its own.

    Raises:
        ValueError: a weight is too large for its dtype.
    """
    dtypes = {name: target.dtype for name, target in model.state_dict().items()}
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, given in tensors.items():
        tensor = given.detach().to("cpu", dtypes[name]).contiguous()
        if tensor.dtype != given.dtype and not bool(torch.isfinite(tensor).all()):
            dtype = dtype_name(tensor.dtype)
            raise ValueError(f"export.dtype={dtype}: {name} has values beyond it; choose bfloat16 or float32")
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        stored[name] = tensor
    return stored


def _write_weights(model: Any, tensors: dict[str, Tensor], folder: Path, *, max_shard_size: str) -> None:
    """Let transformers write weights and config.

    Raises:
        OSError: writing failed.
    """
    try:
        with _without_progress_bars():
            model.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)
    except SafetensorError as error:
        raise OSError(f"the weights cannot be written ({error})") from error


def _check_shapes(folder: Path, source: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the files just written with the source's, name by name.

    Raises:
        ValueError: a tensor changed its shape.
    """
    written = folder_weights(folder).shapes()
    changed = [
        f"{name} is {list(written[name])} instead of {list(shape)}"
        for name, shape in source.items()
        if name in written and tuple(written[name]) != tuple(shape)
    ]
    if changed:
        raise ValueError(f"{folder.name}: shapes are not the source's: {'; '.join(changed[:6])}")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for the files it writes."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def companions(checkpoint: StoredModel) -> dict[str, Path]:
    """Return what a saved model takes over from its source's folder byte for byte, by the names it has there.

    These are the files of the tokenizer and the generation config; there are none where the source is a GGUF file.

    Raises:
        ValueError: the generation config is none, so that transformers would not load what is saved.
    """
    folder = Path(checkpoint.tokenizer)
    if not folder.is_dir():
        return {}
    files = tokenizer_files(folder)
    generation = folder / GENERATION_FILE
    if generation.exists():
        try:
            read_json(generation)
        except UnreadableError as error:
            where = f"model.path={generation}"
            raise ValueError(f"{where}: cannot be read ({error.reason}); correct it, or remove it") from None
        files.append(generation)
    return {str(file.relative_to(folder)): file for file in files}
