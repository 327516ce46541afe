"""Build a stored model without its memory, rotations and quantizers in place: nowhere else is it done."""

from __future__ import annotations

import torch

from rotexp.config.schema import Config
from rotexp.models.arch import find_spec
from rotexp.models.load import build_model, checkpoint_layers
from rotexp.models.stored_model import StoredModel
from rotexp.quant.options import QuantConfig
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.mode import Mode
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place
from rotexp.rotation.trainable import train_also


def build_plain(checkpoint: StoredModel, *, dtype: torch.dtype) -> RotatedModel:
    """Build a model on the meta device in which nothing is rotated or quantized.

    Raises:
        ValueError: its architecture is not supported.
    """
    network = build_model(checkpoint, dtype=dtype)
    return RotatedModel(network, find_spec(network), RotationBank(), Mode())


def build_placed(
    checkpoint: StoredModel, rotation: RotationConfig, quant: QuantConfig, *, dtype: torch.dtype, seed: int
) -> RotatedModel:
    """Build a model on the meta device, frozen, with rotations and quantizers in place.

    Raises:
        ValueError: its architecture is not supported, or `place` refuses what was asked for.
    """
    network = build_model(checkpoint, dtype=dtype)
    return place(network, find_spec(network), rotation, quant, seed=seed)


def build_for_run(checkpoint: StoredModel, config: Config, *, dtype: torch.dtype) -> RotatedModel:
    """Build the model of a run on the meta device, where what `train.params` names requires gradients.

    Raises:
        ValueError: as `build_placed`, or nothing has what `train.params` names.
    """
    model = build_placed(checkpoint, config.rotation, config.quant, dtype=dtype, seed=config.seed)
    if config.train.gradient_checkpointing:
        checkpoint_layers(model.network, model.spec)
    train_also(model, config.train.params)
    return model
