"""How much of a device's peak the model's own arithmetic takes (MFU): its operations a token, and peaks of devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotexp.models.arch import decoder_layers, head_dim
from rotexp.rotation.model import RotatedModel

TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """What matrix products of a device reach at most, in 10¹² operations a second, without structured sparsity.

    Attributes:
        half: in float16 and bfloat16, accumulated in float32.
        float32: in float32 proper.
        tf32: in float32 rounded to TF32; None where there is no such thing.
        bfloat16: whether it multiplies bfloat16.
    """

    half: float
    float32: float
    tf32: float | None = None
    bfloat16: bool = True


PEAKS = {
    # NVIDIA's data sheets; from Hopper on they print twice what is reached without sparsity.
    r"Tesla V100-SXM2-\d+GB": Peak(125.0, 15.7, bfloat16=False),
    r"Tesla V100-PCIE-\d+GB": Peak(112.0, 14.0, bfloat16=False),
    r"(Tesla|NVIDIA) T4": Peak(65.0, 8.1, bfloat16=False),
    r"NVIDIA A10": Peak(125.0, 31.2, 62.5),
    r"NVIDIA A30": Peak(165.0, 10.3, 82.0),
    r"NVIDIA A40": Peak(149.7, 37.4, 74.8),
    r"(NVIDIA )?A100[- ]\S+( PCIe)?": Peak(312.0, 19.5, 156.0),
    r"NVIDIA L4": Peak(121.0, 30.3, 60.0),
    r"NVIDIA L40": Peak(181.05, 90.5, 90.5),
    r"NVIDIA L40S": Peak(362.05, 91.6, 183.0),
    r"NVIDIA H100 80GB HBM3": Peak(989.5, 67.0, 494.5),
    r"NVIDIA H100 PCIe": Peak(756.5, 51.0, 378.0),
    r"NVIDIA H(100|200) NVL": Peak(835.5, 60.0, 417.5),
    r"NVIDIA H200": Peak(989.5, 67.0, 494.5),
    r"NVIDIA GH200 \d+GB?( HBM3e)?": Peak(989.5, 67.0, 494.5),
    r"NVIDIA B200": Peak(2250.0, 75.0, 1125.0),
    # NVIDIA's white papers of GA102 and Ada.
    r"NVIDIA GeForce RTX 3090": Peak(71.0, 35.6, 35.6),
    r"NVIDIA GeForce RTX 4090": Peak(165.2, 82.6, 82.6),
    # AMD's data sheets; a MI250X is two devices, each of half its figures.
    r"AMD Instinct MI250X.*": Peak(191.5, 47.9),
    r"AMD Instinct MI3(00|25)X": Peak(1307.4, 163.4, 653.7),
}
"""By the whole of `torch.cuda.get_device_name`: a part of a device (MIG) or a sibling of another speed is not in it."""


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs utilization of one device.

    Attributes:
        flops_per_token: the model's, forward and backward.
        peak: operations a second of the device, None where they are not known.
    """

    flops_per_token: int
    peak: float | None

    def figures(self, tokens_per_s: float) -> dict[str, float]:
        """Return `mfu_pct` of a device that trains on so many tokens a second; nothing where its peak is not known."""
        return {} if self.peak is None else {"mfu_pct": 100.0 * self.flops_per_token * tokens_per_s / self.peak}


def utilization(
    model: RotatedModel, *, tokens: int, weights_trained: bool, device: torch.device, dtype: torch.dtype
) -> Utilization:
    """Return what turns a device's tokens a second into its utilization; see the two functions that it calls."""
    flops = model_flops_per_token(model, tokens=tokens, weights_trained=weights_trained)
    return Utilization(flops, peak_flops(device, dtype))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a device in operations a second, None for a CPU and what is not in `PEAKS`.

    Args:
        dtype: of the operands; float32 is TF32 if torch may round to it (`torch.set_float32_matmul_precision`).
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
    if peak is None or (dtype is torch.bfloat16 and not peak.bfloat16):
        return None
    single = peak.float32 if torch.get_float32_matmul_precision() == "highest" else peak.tf32 or peak.float32
    by_dtype = {torch.float16: peak.half, torch.bfloat16: peak.half, torch.float32: single}
    return by_dtype[dtype] * TERA if dtype in by_dtype else None


def model_flops_per_token(model: RotatedModel, *, tokens: int, weights_trained: bool) -> int:
    """Return the operations that forward and backward of the plain model demand for one token, whatever the sharding.

    Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B: 6 N + 12 L H Q T. A weight is
    multiplied once forward and twice backward, for the gradients of input and weight; N is without look-ups, and of the
    experts only the chosen count. Frozen weights have no gradients, so they take 4 N. What rotexp adds (rotations,
    quantization, the gradients that rotations get by way of frozen weights, a teacher) and recomputation are not in it.

    Args:
        tokens: T, of one block; attention takes every pair, as in the paper (masks and windows are not deducted).
        weights_trained: whether the weights of linears get gradients.
    """
    config: Any = model.network.config
    width = int(config.num_attention_heads * head_dim(config))
    attention = 12 * len(decoder_layers(model.network, model.spec)) * width * tokens
    return (6 if weights_trained else 4) * sum(_multiplied(model)) + attention


def _multiplied(model: RotatedModel) -> Iterator[int]:
    """Yield how many numbers of each matrix one token is multiplied by; a tied head counts at the head."""
    config: Any = model.network.config
    ours = model.unsharded
    for module in model.network.modules():
        if isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower():
            continue
        for matrix in module.parameters(recurse=False):
            if matrix.ndim >= 2 and matrix not in ours:
                experts = math.prod(matrix.shape[:-2])
                yield matrix.numel() // experts * (int(config.num_experts_per_tok) if matrix.ndim > 2 else 1)
