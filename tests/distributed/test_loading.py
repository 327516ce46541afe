"""A sharded model never exists whole on a rank: each reads its own rows, and buffers are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ranks_loading as on_ranks
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from world import run_world

SLACK_BYTES = 48 * 2**20
"""Rotations (R1 of 768), Python objects and the collectives' buffers."""


def test_peak_memory_stays_under_the_shard_and_one_tensor(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=24000,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    source = LlamaForCausalLM(config)
    source.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    ranks = run_world(on_ranks.load, str(tmp_path / "model"), world_size=4, folder=tmp_path)
    original = dict(source.named_buffers())
    for rank in ranks:
        assert rank["full"] > 350e6
        assert rank["local"] < rank["full"] / 3.9
        assert rank["grown"] < rank["local"] + rank["largest"] + SLACK_BYTES < rank["full"] / 1.5
        np.testing.assert_array_equal(rank["down"], source.model.layers[1].mlp.down_proj.weight.detach().numpy())
        assert rank["buffers"]
        for name, buffer in rank["buffers"].items():
            np.testing.assert_array_equal(buffer, original[name].numpy())


EMBEDDING, GATE = "model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight"


def save_spoiled(folder: Path, name: str, row: int, value: float) -> None:
    """Save a small model, one number of which is another."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=61,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row].view(-1)[3 % tensors[name][row].numel()] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("world_size", "strategy", "dtype", "precision", "spoiled", "said"),
    [
        (1, "no_shard", "float32", "none", (EMBEDDING, 60, torch.nan), "holds nan (row 60); "),
        (2, "full", "float32", "none", (EMBEDDING, 60, torch.nan), "holds nan (row 60); "),
        (2, "full", "float32", "none", (EMBEDDING, 0, torch.inf), "holds inf (row 0); "),
        (2, "full", "float16", "none", (GATE, 47, 1e5), ": max |w| = 1e+05 overflows model.dtype=float16, "),
        (2, "full", "float32", "fp16", (GATE, 1, 1e5), ": max |w| = 1e+05 overflows sharding.param_dtype=float16, "),
        (2, "no_shard", "float32", "fp16", (GATE, 1, 1e5), None),
        (2, "zero2_master", "bfloat16", "none", ("model.norm.weight", 9, torch.nan), "holds nan (row 9); "),
    ],
)
def test_what_one_rank_cannot_take_every_rank_refuses_alike(
    tmp_path: Path,
    world_size: int,
    strategy: str,
    dtype: str,
    precision: str,
    spoiled: tuple[str, int, float],
    said: str | None,
) -> None:
    """The rows of one rank alone are spoiled; no rank is left in a collective that the others never enter."""
    folder, (name, _row, _value) = tmp_path / "model", spoiled
    save_spoiled(folder, *spoiled)
    ranks = run_world(on_ranks.refuse, str(folder), strategy, precision, dtype, world_size=world_size, folder=tmp_path)
    assert [rank["ranks"] for rank in ranks] == [world_size] * world_size
    (message,) = {rank["said"] for rank in ranks}
    if said is None:
        assert message == ""
    else:
        assert message.startswith(f"model.path={folder}: {name} in model.safetensors")
        assert said in message


@pytest.mark.parametrize(
    ("precision", "value", "said"),
    [("none", torch.inf, "holds inf (row 1); "), ("fp16", 1e5, "overflows sharding.param_dtype=float16")],
)
def test_ranks_refuse_a_sharded_teacher_alike(tmp_path: Path, precision: str, value: float, said: str) -> None:
    """Its first rows lie on the first rank alone."""
    save_spoiled(tmp_path / "model", GATE, 1, value)
    ranks = run_world(
        on_ranks.refuse_teacher, str(tmp_path / "model"), "zero2", precision, world_size=2, folder=tmp_path
    )
    assert [rank["ranks"] for rank in ranks] == [2, 2]
    (message,) = {rank["said"] for rank in ranks}
    assert said in message
