"""The model that a finished run ended with: rotations placed and read, invariance proved, merged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotexp.models.load import open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.stored_model import StoredModel
from rotexp.orthogonal.hadamard import HadamardTransform
from rotexp.rotation.building import build_for_run
from rotexp.rotation.file import LoadedRotations, assign_rotations, load_rotations
from rotexp.rotation.invariance import proof_tokens
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.proof import merge_and_prove, prepare_and_prove
from rotexp.rotation.trainable import check_trained, load_trained
from rotexp.runfolder.finished_run import FinishedRun
from rotexp.runfolder.layout import WEIGHTS_FILE
from rotexp.sharding.communication import Communication


@dataclass(frozen=True)
class FinishedModel:
    """A finished run's model before it is merged, in float32, its weights not read yet.

    Attributes:
        checkpoint: its source.
        model: rotations and quantizers in place, its bank holding the run's rotations.
        loaded: the run's rotations as its file has them.
        must_run: what the plain model does not do and a merged one needs, see `requirements`.
        trained: the file of what was trained beside the rotations; None if nothing was.
    """

    checkpoint: StoredModel
    model: RotatedModel
    loaded: LoadedRotations
    must_run: dict[str, Any]
    trained: Path | None = None


def build_finished(run: FinishedRun) -> FinishedModel:
    """Build the model a run ended with, without its weights.

    Raises:
        ValueError: the source cannot be opened any more, or the file of rotations or of trained weights is missing,
            damaged or another model's.
    """
    config = run.config
    loaded = load_rotations(run.rotations, key="run")
    checkpoint = open_checkpoint(config.model, seed=config.seed)
    model = build_for_run(checkpoint, config, dtype=torch.float32)
    assign_rotations(
        model.bank, loaded, model=checkpoint.identity, placements=model.placements, online=model.online, key="run"
    )
    return FinishedModel(checkpoint, model, loaded, requirements(model), _trained(model, run))


def _trained(model: RotatedModel, run: FinishedRun) -> Path | None:
    """Return the file of what the run trained beside rotations, checked, or None if it trained nothing else."""
    if not model.trained_names or not run.config.train.steps:
        return None
    path = run.folder / WEIGHTS_FILE
    if not path.is_file():
        params = run.config.train.params.name
        raise ValueError(f"run={run.folder}: {WEIGHTS_FILE} is missing, and it trained {params}; restore it")
    check_trained(model, path)
    return path


def merge_finished(finished: FinishedModel) -> float:
    """Read the weights, merge the rotations into them, and prove that the float model is what it was.

    What was trained beside rotations is read once the rotated source is proved, and the merge is proved against it.

    Returns:
        The merged model's relative logit error against the source, or against the rotated model where its weights were
        trained, all in float32.

    Raises:
        ArithmeticError: it, or that of the rotated model before the merge, exceeds the limit.
    """
    model = finished.model
    materialize(model.network, finished.checkpoint, device=torch.device("cpu"), added=model.added)
    token_ids = proof_tokens(model.network)
    original, _ = prepare_and_prove(model, token_ids, dtype=torch.float32, communication=Communication())
    if finished.trained is not None:
        load_trained(model, finished.trained)
    model.network.requires_grad_(False)
    return merge_and_prove(model, original, dtype=torch.float32, weights_trained=finished.trained is not None)


def requirements(model: RotatedModel) -> dict[str, Any]:
    """Return what an engine has to do beside the plain model: online transforms, and norms of another kind.

    Returns:
        `online`: name, kind, order, Kronecker factors and place of every transform; `rms_norms`: the norms that
        subtract no mean. Both are empty where the plain model is all it takes.
    """
    online = [_transform(name, order, model) for name, order in model.online.items()]
    return {"online": online, "rms_norms": list(model.rms_norms)}


def _transform(name: str, order: int, model: RotatedModel) -> dict[str, Any]:
    places = {
        "R3": f"each head's queries and keys in every {model.spec.attention}, after the position embedding",
        "R4": f"the input of {', '.join(_transforming(model.network, order))}, before it is quantized",
    }
    return {
        "name": name,
        "kind": "hadamard",
        "order": order,
        "factors": list(HadamardTransform(order).factors),
        "where": places[name.partition("_")[0]],
        "formula": "x @ H / sqrt(order) on each block of that order, H = rotexp.orthogonal.hadamard.hadamard(order)",
    }


def _transforming(network: nn.Module, order: int) -> list[str]:
    """Return the modules that hold a transform of that order, `*` for the numbers of layers and experts."""
    names = (
        re.sub(r"\.\d+(?=\.|$)", ".*", name)
        for name, module in network.named_modules()
        if any(isinstance(value, HadamardTransform) and value.order == order for value in vars(module).values())
    )
    return list(dict.fromkeys(names))
