"""Model FLOPs against torch's own count of the plain model, and peaks by the names that devices give."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, make_source, rotated
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rotexp.config.schema import Config
from rotexp.data.options import DataConfig
from rotexp.experiment.training_phase import find_utilization
from rotexp.metrics.flops import Utilization, model_flops_per_token, peak_flops
from rotexp.models.options import ModelConfig, ModelDtype, ModelSource
from rotexp.training.options import Trainable, TrainConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCKS, TOKENS = 2, 6


def counted(source: Any, *, weights_trained: bool) -> int:
    """Return the operations that torch sees in forward and backward of a plain model, down to its embeddings."""
    source.requires_grad_(weights_trained)
    token_ids = torch.arange(BLOCKS * TOKENS).view(BLOCKS, TOKENS)
    embeddings: Tensor = source.get_input_embeddings()(token_ids).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        source(inputs_embeds=embeddings, use_cache=False).logits.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("weights_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", FAMILIES)
def test_model_flops_are_those_of_the_plain_model(name: str, weights_trained: bool) -> None:
    model = rotated(make_source(name))
    source = make_source(name, attn_implementation="eager", experts_implementation="eager")
    expected = counted(source, weights_trained=weights_trained)
    found = model_flops_per_token(model, tokens=TOKENS, weights_trained=weights_trained)
    assert BLOCKS * TOKENS * found == expected


A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
NAMES = {
    A100: 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "A100-PCIE-40GB": 312e12,
    H100: 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA GH200 480GB": 989.5e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "AMD Instinct MI300X": 1307.4e12,
    "NVIDIA A10G": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "Tesla V100-SXM2-16GB": None,
    "something new": None,
}
"""Peaks in bfloat16."""


def name_the_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let torch say that its device is called so."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)


@pytest.mark.parametrize(("name", "peak"), NAMES.items(), ids=NAMES)
def test_a_peak_is_found_by_the_whole_name_of_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    name_the_device(monkeypatch, name)
    assert peak_flops(CUDA, torch.bfloat16) == peak


def test_a_peak_depends_on_the_dtype_and_on_what_float32_may_be_rounded_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    name_the_device(monkeypatch, "Tesla V100-SXM2-16GB")
    precision = "high"
    assert [peak_flops(CUDA, dtype) for dtype in (torch.float16, torch.float32)] == [125e12, 15.7e12]
    name_the_device(monkeypatch, A100)
    assert peak_flops(CUDA, torch.float32) == 156e12
    precision = "highest"
    assert peak_flops(CUDA, torch.float32) == 19.5e12
    assert peak_flops(CUDA, torch.float64) is None


def test_a_cpu_has_no_known_peak_and_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    name_the_device(monkeypatch, A100)
    assert peak_flops(CPU, torch.float32) is None
    assert Utilization(10**9, peak=None).figures(100.0) == {}


def test_a_device_at_its_peak_is_utilized_whole() -> None:
    assert Utilization(4 * 10**9, peak=312e12).figures(312e12 / 4e9) == {"mfu_pct": pytest.approx(100.0)}


@pytest.fixture
def warned() -> list[str]:
    """What a run told people."""
    return []


@pytest.fixture
def context(warned: list[str]) -> Any:
    """What is looked at of a run, on an accelerator that there need not be."""
    config = Config(
        model=ModelConfig("small", ModelSource.hf, dtype=ModelDtype.bfloat16),
        data=DataConfig("text", sequence_length=TOKENS),
        train=TrainConfig(params=Trainable.all),
    )
    return SimpleNamespace(device=CUDA, config=config, messages=SimpleNamespace(warn=warned.append))


def test_a_run_knows_its_device(context: Any, warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name_the_device(monkeypatch, H100)
    model = rotated(make_source("llama"))
    flops = model_flops_per_token(model, tokens=TOKENS, weights_trained=True)
    assert find_utilization(context, model) == Utilization(flops, 989.5e12)
    context.config = dataclasses.replace(context.config, train=TrainConfig(params=Trainable.rotations_and_norms))
    frozen = model_flops_per_token(model, tokens=TOKENS, weights_trained=False)
    assert find_utilization(context, model) == Utilization(frozen, 989.5e12)
    assert warned == []


def test_a_run_names_a_device_that_it_does_not_know(
    context: Any, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name_the_device(monkeypatch, "NVIDIA Unheard 9000")
    assert find_utilization(context, rotated(make_source("llama"))).peak is None
    (line,) = warned
    assert "throughput/mfu_pct" in line
    assert "NVIDIA Unheard 9000 in torch.bfloat16" in line
