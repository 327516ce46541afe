"""What the ranks of the memory tests do: train a model that no world divides evenly, and weigh what they hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.trained_memory import MemoryRequest, measure_rank
from rotexp.config.components import Component
from rotexp.models.options import ModelDtype
from rotexp.models.stored_model import RandomWeights, StoredModel
from rotexp.models.structure import read_structure
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.own_rows import division
from rotexp.rotation.own_rows.cost import multiply_adds_per_byte
from rotexp.training.options import EMAConfig, Trainable

TOKENS = 6


def odd_checkpoint() -> StoredModel:
    """Return a random Llama whose vocabulary, widths and numbers of rows neither 2 nor 4 ranks share evenly."""
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=30,
        intermediate_size=27,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=6,
        attention_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    structure = read_structure(config, where="odd")
    names = {structure.head: structure.embedding}
    return StoredModel("odd", structure.config, RandomWeights(structure.shapes, 0), str(Path()), aliases=dict(names))


def odd_config(
    strategy: str,
    *,
    params: str = "all",
    dtype: str = "float32",
    distills: bool = False,
    r1: bool = True,
    **sharding: Any,
) -> Any:
    """Return a run whose smallest parameters stay whole unless told otherwise, with averages, distilling or not."""
    config = MemoryRequest(strategy).config()
    objective = Component("kl", "rotexp.training.objectives.KLDivergence") if distills else config.objective
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype=ModelDtype[dtype]),
        rotation=RotationConfig("learned", r1=r1, r2=True, init=RotationInit.random),
        optimizer=dataclasses.replace(config.optimizer, momentum=0.5),
        objective=objective,
        train=dataclasses.replace(config.train, params=Trainable[params]),
        ema=EMAConfig(0.5),
        sharding=dataclasses.replace(config.sharding, strategy=strategy, **sharding),
    )


def measure_all(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Measure cases by name, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checkpoint = odd_checkpoint()
    return {name: measure(checkpoint, **case) for name, case in cases.items()}


def measure(checkpoint: StoredModel, *, wire: int | None = None, **case: Any) -> dict[str, Any]:
    """Measure a case; `wire` multiply-adds for a byte (None: as a run has it) decide which weights are divided."""
    cost = multiply_adds_per_byte("cpu") if wire is None else wire
    with mock.patch.object(division, "multiply_adds_per_byte", return_value=cost):
        return measure_rank(checkpoint, odd_config(**case), tokens=TOKENS)
