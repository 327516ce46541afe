"""A sharded model never exists whole on a rank: each reads its own rows, and buffers are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ranks_loading as on_ranks
import torch
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
