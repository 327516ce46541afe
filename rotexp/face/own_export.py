"""Write a placed model of the user's own: a plain checkpoint once it is merged, or its rotations as `R.bin`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotexp.errors.wording import dtype_name
from rotexp.experiment.exporting import plain_fault
from rotexp.experiment.finished_model import requirements
from rotexp.experiment.options import ExportDtype, ExportFormat, ExportOptions
from rotexp.files.folders import check_free, complete_folder
from rotexp.models.save import MANIFEST_FILE, save_checkpoint
from rotexp.rotation.file import save_r_bin
from rotexp.rotation.mode import BROKEN
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.local_rows import reshard


def export_model(placed: RotatedModel, target: Path, options: ExportOptions, *, tokenizer: Any) -> None:
    """Write the model, or its rotations; every rank calls, the first writes.

    Raises:
        ValueError: the target is not free, the model is not merged or has no rotations any more, or a plain model does
            not do what it needs.
        OSError: writing failed.
    """
    if _writes() or (options.format is ExportFormat.checkpoint and _is_sharded(placed.network)):
        check_free(target, key="path")  # where nothing is gathered, others may come when the first has written
    config: Any = placed.network.config
    must_run = requirements(placed)
    manifest = {"rotexp": version("rotexp"), "format": options.format.name, "must_run": must_run}
    _check_request(placed, must_run, options)
    if options.format is ExportFormat.r_bin:
        _write_rotations(placed, target, manifest)
        return
    weights = _whole(placed)
    if _writes():
        dtype = _dtype(placed, options)
        save_checkpoint(
            target,
            weights,
            config,
            dtype=dtype,
            tokenizer=tokenizer,
            generation=getattr(placed.network, "generation_config", None),
            manifest=manifest | {"dtype": dtype_name(dtype)},
            max_shard_size=options.max_shard_size,
        )


def _check_request(placed: RotatedModel, must_run: dict[str, Any], options: ExportOptions) -> None:
    """Refuse what the model, in the state it is in, cannot be written as, with all that has to be done.

    Raises:
        ValueError: see there.
    """
    if placed.prepared and placed.proof is None:
        raise ValueError(f"export: {BROKEN}")
    merged = placed.prepared and not len(placed.bank)
    faults = []
    if options.format is ExportFormat.r_bin and not len(placed.bank):
        faults = ["export.format=r_bin: the model has no rotations, or they are merged; export them before"]
    elif options.format is ExportFormat.checkpoint and not merged and not placed.added:
        faults = ["export: the rotations are not merged into the weights; call rotexp.merge(placed) before"]
    network: Any = placed.network
    first = "load the model anew, place, prepare and train it, and before it is merged " if merged else ""
    fault = plain_fault(placed.added, must_run, options, model_type=network.config.model_type, first=first)
    if faults := [*faults, *([fault] if fault else [])]:
        raise ValueError("; also ".join(faults))


def _write_rotations(placed: RotatedModel, target: Path, manifest: dict[str, Any]) -> None:
    if _writes():
        with complete_folder(target, key="path") as folder:
            save_r_bin(folder / "R.bin", placed.bank.snapshot(), layers=placed.spec.layers)
            (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _whole(placed: RotatedModel) -> dict[str, Tensor]:
    """Return the model's tensors by name, gathered where they are sharded (a collective)."""
    reshard(placed.network)
    held = placed.network.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in held.items()}


def _is_sharded(network: nn.Module) -> bool:
    """Return whether ranks wait for each other where its tensors are gathered."""
    return any(isinstance(parameter, DTensor) for parameter in network.parameters())


def _dtype(placed: RotatedModel, options: ExportOptions) -> torch.dtype:
    """Return the dtype of the stored weights: the one asked for, or that of the embedding."""
    if options.dtype is not ExportDtype.auto:
        asked: torch.dtype = getattr(torch, options.dtype.name)
        return asked
    network: Any = placed.network
    held: torch.dtype = network.get_input_embeddings().weight.dtype
    return held


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
