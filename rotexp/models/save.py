"""Save a model as a folder that plain transformers reads: complete, or absent."""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import Tensor, nn

from rotexp.models.checkpoint import Checkpoint, SafetensorsWeights, safetensors_files

MANIFEST_FILE = "rotexp_manifest.json"
GENERATION_FILE = "generation_config.json"
FOREIGN_SETTINGS = ("quantization_config", "compression_config")
"""What a source's config says of how its weights were stored, which is not how ours are."""


@contextmanager
def complete_folder(target: Path, *, key: str = "export.path") -> Iterator[Path]:
    """Yield an empty folder beside `target` that becomes it, flushed to the disk, when the block ends well.

    Raises:
        ValueError: `target` is a file, or a folder that holds something.
    """
    check_free(target, key=key)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            _flush(path)
        aside.rename(target)  # onto nothing, or onto an empty folder
        _flush(target.parent)
    except SafetensorError as error:
        raise OSError(f"{key}={target}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_free(target: Path, *, key: str = "export.path") -> None:
    """Refuse a place that holds something.

    Raises:
        ValueError: it does.
    """
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{key}={target}: is a folder that is not empty; choose another, or empty it")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{key}={target}: is a file; name a folder to make")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Any,
    *,
    dtype: torch.dtype,
    tokenizer: Any = None,
    generation_config: Path | None = None,
    manifest: Mapping[str, Any] | None = None,
    source_shapes: Mapping[str, tuple[int, ...]] | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a Hugging Face checkpoint, complete or not at all.

    Args:
        folder: does not exist, or is empty.
        tensors: every parameter and buffer of the plain model by its name there; an untied head is among them.
        config: the source's `PretrainedConfig`; it is not changed.
        dtype: in which weights are stored, but for those that the model itself keeps in float32.
        tokenizer: a Hugging Face tokenizer.
        generation_config: a file that is copied as it is (None: transformers makes one from the config).
        manifest: becomes `rotexp_manifest.json`.
        source_shapes: shapes in the source's files; those of the same names must come out equal.
        max_shard_size: of one file of weights.

    Raises:
        ValueError: the folder is taken, names or shapes are not those of the plain model, or a weight is too large for
            the dtype.
        OSError: writing failed.
    """
    tied = _is_tied(config, tensors)
    model = plain_model(config, dtype=dtype, tied=tied)
    check_fits(model, tensors)
    with complete_folder(folder) as aside:
        stored = _stored_tensors(model, tensors, tied=tied)
        with _without_progress_bars():
            model.save_pretrained(aside, state_dict=stored, max_shard_size=max_shard_size)
        _check_shapes(aside, source_shapes or {})
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        if generation_config is not None:
            shutil.copyfile(generation_config, aside / GENERATION_FILE)
        if manifest is not None:
            (aside / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def plain_model(config: Any, *, dtype: torch.dtype, tied: bool = False) -> Any:
    """Build what `AutoModelForCausalLM.from_pretrained` would from a clean copy of the config, without memory."""
    from transformers import AutoModelForCausalLM

    clean = copy.deepcopy(config)
    for name in FOREIGN_SETTINGS:
        if hasattr(clean, name):
            delattr(clean, name)
    clean._attn_implementation = None
    clean.tie_word_embeddings = tied
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
        more = f"; and {len(faults) - 6} more" if len(faults) > 6 else ""
        raise ValueError(f"{type(model).__name__}: the merged model does not fit it: {'; '.join(faults[:6])}{more}")


def _is_tied(config: Any, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the source ties head and embedding, and they are equal still."""
    if not getattr(config, "tie_word_embeddings", False):
        return False
    names = _head_and_embedding(plain_model(config, dtype=torch.float32))
    return names is not None and torch.equal(*(tensors[name] for name in names))


def _head_and_embedding(model: Any) -> tuple[str, str] | None:
    """Return the names of the head's and the embedding's weights, if the model has both."""
    modules = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    head, embedding = (names.get(module) for module in modules)
    return (f"{head}.weight", f"{embedding}.weight") if head and embedding else None


def _stored_tensors(model: Any, tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Return tensors of the model's dtypes, on the host and each with a storage of its own; a tied head is left out."""
    names = _head_and_embedding(model) if tied else None
    stored: dict[str, Tensor] = {}
    for name, target in model.state_dict().items():
        if names is not None and name == names[0]:
            continue
        tensor = tensors[name].detach().to("cpu", target.dtype).contiguous()
        if tensor.dtype != tensors[name].dtype and not bool(torch.isfinite(tensor).all()):
            dtype = str(target.dtype).split(".")[-1]
            raise ValueError(f"export.dtype={dtype}: {name} has values beyond it; choose bfloat16 or float32")
        stored[name] = tensor
    storages: set[int] = set()
    for name, tensor in stored.items():
        if tensor.untyped_storage().data_ptr() in storages:
            stored[name] = tensor.clone()
        storages.add(stored[name].untyped_storage().data_ptr())
    return stored


def _check_shapes(folder: Path, source: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the files just written with the source's, name by name.

    Raises:
        ValueError: a tensor changed its shape.
    """
    written = SafetensorsWeights(safetensors_files(folder)).shapes()
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
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def generation_file(checkpoint: Checkpoint) -> Path | None:
    """Return the source's generation config, if it lies in a folder and has one."""
    file = Path(checkpoint.tokenizer) / GENERATION_FILE
    return file if file.is_file() else None


def check_shard_size(size: str, *, key: str = "export.max_shard_size") -> None:
    """Refuse a size that transformers cannot read.

    Raises:
        ValueError: it is no number with a unit.
    """
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", size):
        raise ValueError(f"{key}={size}: must be a whole number with KB, MB, GB or TB; write 5GB or so")
