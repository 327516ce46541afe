"""Choose what is trained beside rotations, start the scales that are learned, and read back what was trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rotexp.errors.wording import few_faults
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.scales import QuantizerScales
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.model import SCALES, RotatedModel
from rotexp.sharding.local_rows import gathered, largest_magnitude, reshard, write_rows
from rotexp.training.options import Trainable


def train_also(model: RotatedModel, params: Trainable) -> None:
    """Let what `train.params` names require gradients; to be called once, after placing and before sharding.

    Norms are trained where they stand: one that is folded acts between the rotated stream and its rotated readers, from
    a gain of one and a bias of zero on.

    Raises:
        ValueError: scales are to be trained, and no weight is quantized.
    """
    if params is Trainable.rotations_and_scales:
        _own_scales(model)
    elif params is Trainable.rotations_and_norms:
        for norm in _norms(model.network):
            norm.requires_grad_()
    elif params is Trainable.all:
        rotations = set(model.bank.parameters())
        for parameter in model.network.parameters():
            if parameter not in rotations:
                parameter.requires_grad_()


def _norms(network: nn.Module) -> Iterator[nn.Module]:
    """Yield every norm, whether folded or not: each family calls its classes so."""
    return (module for module in network.modules() if "norm" in type(module).__name__.lower())


def _own_scales(model: RotatedModel) -> None:
    """Register one ratio for each group of each quantized weight, and give its quantizer a handle."""
    scales = QuantizerScales()
    for name, module in model.network.named_modules():
        if isinstance(module, (RotatedLinear, RotatedExperts)):
            for own, quantizer in module.weight_quantizers.items():
                if quantizer.spec.enabled:
                    _check_learns(quantizer)
                    *outputs, width = module.get_parameter(own).shape
                    ratios = torch.ones(*outputs, quantizer.spec.num_groups(width))
                    quantizer.learned = scales.add(f"{name}.{own}", ratios)
    if not list(scales.parameters()):
        raise ValueError(
            "train.params=rotations_and_scales: quant.weights.bits=16 leaves weights without scales; choose a quant "
            "with quantized weights, or train.params=rotations"
        )
    model.scales = scales
    model.network.register_module(SCALES, scales)


def _check_learns(quantizer: FakeQuantizer) -> None:
    if not quantizer.quantizer.learns_clip_ratio:
        raise ValueError(
            f"train.params=rotations_and_scales: quant.weights.{quantizer.spec.setting} has no scales that can be "
            "learned; choose another quant, or train.params=rotations"
        )


@torch.no_grad()
def start_scales(model: RotatedModel) -> None:
    """Let learned scales begin where the weights as now rotated have theirs, and act from here on.

    Under sharding one unit at a time is whole. Ranks may differ where two ratios are equally good, so broadcast after.
    """
    if model.scales is None:
        return
    reshard(model.network)
    model.scales.in_use = False
    for unit in model.units:
        with gathered(unit):
            for module in unit.modules():
                if isinstance(module, (RotatedLinear, RotatedExperts)):
                    _start(module)
    model.scales.in_use = True


def _start(module: RotatedLinear | RotatedExperts) -> None:
    if any(quantizer.learned is not None for quantizer in module.weight_quantizers.values()):
        rotated = module.merged()
        for name, quantizer in module.weight_quantizers.items():
            quantizer.start(rotated[name])


def check_trained(model: RotatedModel, path: Path, *, key: str = "run") -> None:
    """Compare names and shapes in a file of trained weights with what the model trains; reads no tensor.

    Args:
        path: safetensors, by `trained_names`, each whole.
        key: the configuration's key that led to the file, for messages.

    Raises:
        ValueError: the file cannot be read, or a parameter is missing, unexpected or misshapen. Faults are named.
    """
    expected = {name: list(model.network.get_parameter(name).shape) for name in model.trained_names}
    with _opened(path, key) as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not trained here" for name in found if name not in expected]
    faults += [
        f"{name} is {found[name]}, not {shape}" for name, shape in expected.items() if found.get(name, shape) != shape
    ]
    if faults:
        raise ValueError(f"{key}={path}: {few_faults(faults)}; restore the file, or run the training again")


@torch.no_grad()
def load_trained(model: RotatedModel, path: Path, *, key: str = "run") -> None:
    """Read trained weights into a prepared model, and use the scales among them.

    Raises:
        ValueError: as `check_trained`, or a tensor is not finite.
    """
    check_trained(model, path, key=key)
    reshard(model.network)
    with _opened(path, key) as file:
        for name in model.trained_names:
            trained = file.get_tensor(name)
            if not math.isfinite(largest := largest_magnitude(trained)):
                raise ValueError(f"{key}={path}: {name} holds {largest}; restore the file, or run the training again")
            write_rows(model.network.get_parameter(name), trained)
    if model.scales is not None:
        model.scales.in_use = True


@contextmanager
def _opened(path: Path, key: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{key}={path}: cannot be read as safetensors ({error}); restore it") from None
