"""A second, frozen model to distill from and to compare with, for where training changes the float model itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotexp.config.schema import Config
from rotexp.models.materialize import materialize
from rotexp.models.rounding_noise import perturb_embedding
from rotexp.models.stored_model import StoredModel
from rotexp.rotation.building import build_plain
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.applying import precision_policy, shard
from rotexp.sharding.communication import Communication
from rotexp.sharding.guard import install


@dataclass(frozen=True)
class LoadedTeacher:
    """The float model as it was; see `rotexp.training.objectives.Teacher`."""

    model: RotatedModel

    @torch.no_grad()
    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the logits (batch, tokens, vocabulary) of token ids (batch, tokens)."""
        return self.model.logits(token_ids)


def load_teacher(
    checkpoint: StoredModel,
    config: Config,
    *,
    device: torch.device,
    communication: Communication,
    ranks_per_node: int | None,
) -> LoadedTeacher:
    """Read the checkpoint once more, sharded and guarded like the student, without rotations and quantizers.

    Raises:
        ValueError: its weights cannot be read (any more), on all ranks alike if so on one.
    """
    model = build_plain(checkpoint, dtype=getattr(torch, config.model.dtype.name))
    shard(
        model.network,
        config.sharding,
        units=model.units,
        ignored=set(),
        device_type=device.type,
        world_size=communication.world_size,
        ranks_per_node=ranks_per_node,
        frozen=True,
    )
    install(model.network, config.sync_mode, name=teacher_name(checkpoint))
    materialize(
        model.network,
        checkpoint,
        device=device,
        compute_dtype=precision_policy(config.sharding).param_dtype,
        communication=communication,
    )
    checkpoint.weights.release()
    if (noise := config.numerics.noise_seed) is not None:  # which the student has, too
        perturb_embedding(model.network, seed=noise)

    return LoadedTeacher(model)


def teacher_name(checkpoint: StoredModel) -> str:
    """Return what the second model is called beside the first, which has the checkpoint's name."""
    return f"{checkpoint.identity} (teacher)"
