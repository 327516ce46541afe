"""What the ranks of the evaluation's tests do: compare variants of models, sharded or whole, with what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks_families import QUANTS, ROTATION, load_sharded, make_source

from rotexp.metrics.float_answers import FloatAnswers, next_token_loss
from rotexp.metrics.quality import Quality, Share
from rotexp.models.arch import find_spec
from rotexp.rotation import readout
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.placement import place
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import reshard

QUANT = QUANTS["w4a4kv4"]
NAMES = ("qwen2", "gpt_neox", "gemma")
"""A head that is tied until R1 parts it from the embedding; norms that subtract means; gains with an offset."""
VOCABULARY = 61
"""Of all of them."""
WINDOWS = np.random.default_rng(0).integers(3, VOCABULARY, size=(5, 12))

Figures = dict[str, list[Quality]]


def load(name: str, strategy: str) -> RotatedModel:
    """Place a model, sharded unless there is no process group."""
    source = make_source(name)
    if dist.is_initialized():
        return load_sharded(source, strategy, QUANT)[0]
    return place(source, find_spec(source), ROTATION, QUANT, seed=0)


def figures(name: str, strategy: str) -> Figures:
    """Return the figures of every variant, by the state in which the float model answered."""
    ranks = Communication.of_world()
    share = Share(1, torch.device("cpu"), rank=ranks.rank, world_size=ranks.world_size, collect=ranks.reduce_)
    model, teacher = load(name, strategy), load(name, strategy)
    found: Figures = {"loss": []}
    kept: dict[str, tuple[FloatAnswers, Any]] = {}
    for stage, rotate in _stages(model):
        kept[stage] = FloatAnswers(WINDOWS, share, expects=True), None
        kept[f"{stage}, states"] = FloatAnswers(WINDOWS, share, expects=False), None
        kept[f"{stage}, anew"] = FloatAnswers(WINDOWS, share, expects=True, kept=False), None
        kept[f"{stage}, teacher"] = FloatAnswers(WINDOWS, share, expects=False), teacher
        for kind in ("", ", states", ", anew", ", teacher"):
            found[stage + kind] = [kept[stage + kind][0].make(model, teacher=kept[stage + kind][1])]
        for name_of, (answers, own) in kept.items():
            model.refresh_quantizers()
            with model.mode.set(rotate=rotate, quantize=True):
                found[name_of].append(answers.compared(model, teacher=own))
        model.refresh_quantizers()
        with model.mode.set(rotate=rotate, quantize=True):
            found["loss"].append(Quality.of_means(next_token_loss(model, WINDOWS, share=share)))
        reshard(model.network)
    return found


def _stages(model: RotatedModel) -> Iterator[tuple[str, bool]]:
    yield "as it comes", False
    prepare(model)
    yield "rotated", True
    merge(model)
    yield "merged", True


def all_figures(strategies: list[str]) -> dict[tuple[str, str], Figures]:
    """Return those of every model under every strategy, one after another in one process group, if there is one."""
    torch.set_num_threads(1)
    if strategies != ["one"]:
        dist.init_process_group("gloo")
    readout.CHUNK_BYTES = 4 * VOCABULARY * 7
    return {(name, strategy): figures(name, strategy) for strategy in strategies for name in NAMES}
