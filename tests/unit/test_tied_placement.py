"""A tied model of transformers that is placed from Python stays the model it was, also where it is tied again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, WANTED, from_config, logits, make_source, make_token_ids, wanted
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotexp.config import QuantConfig, RotationConfig
from rotexp.models.arch import find_spec, head_name, is_tied
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.placement import place

TIED = ("llama", "gemma", "cohere", "opt", "gpt_neox", "gptj", "stablelm", "gemma2 with binding caps")


def tied_and_placed(name: str, rotation: RotationConfig) -> tuple[Any, RotatedModel]:
    """Return a tied Hugging Face model, and a copy with rotations placed."""
    source = make_source(name, tie_word_embeddings=True)
    assert is_tied(source)
    network = copy.deepcopy(source)
    return source, place(network, find_spec(network), rotation, QuantConfig(), seed=0)


@pytest.mark.parametrize("placement", WANTED)
@pytest.mark.parametrize("name", TIED)
def test_a_tied_model_computes_the_same_though_transformers_ties_it_again(name: str, placement: str) -> None:
    rotation = wanted(name, placement)
    source, model = tied_and_placed(name, rotation)
    token_ids = make_token_ids()
    original = source(token_ids, use_cache=False).logits
    parted = "R1" in model.bank
    assert (model.untied == f"{head_name(source)}.weight") is parted
    network: Any = model.network

    def check() -> None:
        network.tie_weights()
        assert is_tied(network) is not parted
        assert relative_error(original, logits(model, token_ids)) <= 1e-5

    prepare(model)
    check()
    merge(model)
    check()


def test_a_merged_model_that_was_tied_is_saved_and_read_by_transformers(tmp_path: Path) -> None:
    source, model = tied_and_placed("llama", RotationConfig(r1=True, r2=True))
    prepare(model)
    merge(model)
    network: Any = model.network
    plain = from_config(FAMILIES["llama"].config(tie_word_embeddings=False))
    plain.load_state_dict(network.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    network.config.save_pretrained(tmp_path / "plain")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    token_ids: Tensor = make_token_ids()
    with torch.no_grad():
        assert relative_error(source(token_ids).logits, read(token_ids).logits) <= 1e-5
