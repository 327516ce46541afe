"""What a run leaves in its folder beside metrics and summary: rotations, and whatever else was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rotexp.config.composition import config_digest
from rotexp.config.schema import Config
from rotexp.models.stored_model import StoredModel
from rotexp.rotation.file import replacing, save_rotations
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.placement import BANK
from rotexp.runfolder.layout import (
    AVERAGE_FILE,
    AVERAGE_ROTATIONS_FILE,
    BEST_FILE,
    BEST_ROTATIONS_FILE,
    ROTATIONS_FILE,
    WEIGHTS_FILE,
)
from rotexp.sharding.communication import Communication
from rotexp.sharding.state_dicts import full_state
from rotexp.training.state import TrainingState


def origin(config: Config, checkpoint: StoredModel) -> dict[str, Any]:
    """Return what a file of a run says of where it comes from."""
    simulated = config.sharding.sim_world
    return {
        "seed": config.seed,
        "config_digest": config_digest(config),
        "model": checkpoint.identity,
        "revision": checkpoint.revision or "",
        "dtype": config.model.dtype.name,
    } | ({} if simulated is None else {"simulated_world": simulated})


def save_run_files(
    folder: Path,
    model: RotatedModel,
    state: TrainingState,
    *,
    facts: Mapping[str, Any],
    communication: Communication,
) -> None:
    """Write the last rotations, the best and the averaged, and the trained weights; takes all ranks, rank 0 writes.

    A simulated world leaves no weights, since most of them were never stepped.
    """
    files = {ROTATIONS_FILE: model.bank.snapshot()}
    if state.result.best is not None and state.rotations:
        files[BEST_ROTATIONS_FILE] = state.best.rotations
    if state.step and state.ema is not None:
        averaged = state.ema.rotations()
        files[AVERAGE_ROTATIONS_FILE] = {name.removeprefix(f"{BANK}."): matrix for name, matrix in averaged.items()}
    for name, rotations in files.items():
        if communication.rank == 0:
            save_rotations(folder / name, rotations, placements=model.placements, online=model.online, facts=facts)
    if state.names and not state.simulated:
        _save_weights(folder / WEIGHTS_FILE, state, facts=facts, communication=communication)
        if state.result.best is not None:
            _save_best_weights(folder / BEST_FILE, state, facts=facts, communication=communication)
        if state.step and state.ema is not None:
            with state.ema.applied():
                _save_weights(folder / AVERAGE_FILE, state, facts=facts, communication=communication)


def _save_best_weights(
    path: Path, state: TrainingState, *, facts: Mapping[str, Any], communication: Communication
) -> None:
    weights = full_state(state.pieces(state.best.held), communication=communication)
    if communication.rank == 0:
        shapes = {name: state.model.network.get_parameter(name).shape for name in weights}
        _write({name: weight.view(shapes[name]) for name, weight in weights.items()}, path, facts=facts)


def _save_weights(path: Path, state: TrainingState, *, facts: Mapping[str, Any], communication: Communication) -> None:
    weights: dict[str, Tensor] = full_state(state.weights(), communication=communication)
    if state.master is not None:
        weights |= state.master.full()
    if communication.rank == 0:
        _write(weights, path, facts=facts)


def _write(weights: dict[str, Tensor], path: Path, *, facts: Mapping[str, Any]) -> None:
    with replacing(path) as aside:
        save_file(weights, aside, metadata={key: str(value) for key, value in facts.items()})
