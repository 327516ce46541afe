"""A model of the user's own, placed and then sharded by the user, in the user's own loop on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks_face as on_ranks
import torch
from transformers import AutoModelForCausalLM
from world import run_world

pytestmark = pytest.mark.slow


def test_one_and_two_ranks_train_merge_and_save_the_same(tmp_path: Path) -> None:
    (alone,) = run_world(on_ranks.place_shard_train_merge_save, tmp_path, world_size=1, folder=tmp_path)
    first, second = run_world(on_ranks.place_shard_train_merge_save, tmp_path, world_size=2, folder=tmp_path)
    for found in (alone, first, second):
        assert (found["diverged"], found["proof"] < 1e-5, found["merged"] < 1e-5) == ((), True, True)
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        assert found["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)
    for name, matrix in alone["rotations"].items():
        assert torch.equal(first["rotations"][name], second["rotations"][name])
        assert (first["rotations"][name] - matrix).abs().max() < 1e-2
    model = on_ranks.own_model()
    with torch.no_grad():
        expected = model(on_ranks.TOKENS).logits
        for ranks in (1, 2):
            again = AutoModelForCausalLM.from_pretrained(tmp_path / f"saved-{ranks}")
            found = again(on_ranks.TOKENS).logits
            assert (found - expected).abs().max() / expected.abs().max() < 1e-5
            assert not torch.equal(again.lm_head.weight, model.lm_head.weight)  # the rotation is in it


def test_a_model_that_is_sharded_already_is_told_the_order(tmp_path: Path) -> None:
    for refusal in run_world(on_ranks.refuse_what_is_sharded, world_size=2, folder=tmp_path):
        assert refusal.startswith("place: the model is sharded already (")
        assert refusal.endswith(
            "fully_shard each of placed.units and placed.network with ignored_params=placed.unsharded"
        )
