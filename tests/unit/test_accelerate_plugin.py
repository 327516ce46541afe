"""An Accelerate FSDP2 plugin leaves the bank alone, whatever it ignored before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn

from rotexp.rotation.bank import RotationBank
from rotexp.sharding.accelerate_plugin import ignore_module


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bank = RotationBank()
    bank.add("R1", torch.eye(4))
    model.register_module("rotation_bank", bank)
    return model


def ignored_parameters(plugin: Any, model: nn.Module) -> set[str]:
    """Ask Accelerate itself what it would ignore."""
    parameters = get_parameters_from_modules(plugin.ignored_modules, model, torch.device("cpu"))
    return {name for name, parameter in model.named_parameters() if parameter in parameters}


@pytest.mark.parametrize("kind", ["none", "list", "regex"])
def test_the_bank_is_ignored_beside_what_was(model: nn.Module, kind: str) -> None:
    before = {"none": None, "list": [model[0]], "regex": "0|nothing"}[kind]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=before)
    ignore_module(plugin, model, name="rotation_bank")
    ignore_module(plugin, model, name="rotation_bank")
    expected = {"rotation_bank.R1"} | (set() if kind == "none" else {"0.weight", "0.bias"})
    assert ignored_parameters(plugin, model) == expected


def test_a_stale_device_map_is_removed(model: nn.Module) -> None:
    model.hf_device_map = {"": "cpu"}
    ignore_module(FullyShardedDataParallelPlugin(fsdp_version=2), model, name="rotation_bank")
    assert not hasattr(model, "hf_device_map")


def test_an_unknown_module_is_refused(model: nn.Module) -> None:
    with pytest.raises(AttributeError):
        ignore_module(FullyShardedDataParallelPlugin(fsdp_version=2), model, name="bank")
