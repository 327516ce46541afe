"""Whatever causal model transformers has is refused in one line, or its rotations act and change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from families import SHAPE, from_config
from flags import ROW
from test_flags import EXACT, Row, outcome
from test_flags import PLACED as PLACEMENTS
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rotexp.models.arch import find_spec
from rotexp.models.structure import build_network

HIDDEN, HEADS, HEAD_DIM, INNER = 64, 4, 16, 56
SMALL: dict[str, Any] = SHAPE | {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("n_inner", "ffn_dim"), INNER),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id", "eos_token_id"), 1),
    "n_positions": 64,
    "rotary_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
"""Small values of what sizes are called in any config."""

PLACED = {
    *("arcee", "cwm", "ernie4_5", "exaone", "exaone4", "helium", "internlm3", "iquestcoder", "jais2", "ministral3"),
    "seed_oss",
}
"""Models that are in no family and are taken by their structure, at least."""

MOST_PARAMETERS = 3e7
CONFIGS = {
    config_class.model_type: config_class
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING
    if not config_class.sub_configs  # else it holds the config of a language model that is here itself
}


def build(config_class: Any) -> Any:
    """Build a model without memory: small if its config takes these sizes and nothing else is large, else as it is."""
    names = {field.name for field in dataclasses.fields(config_class)}
    try:
        network = build_network(config_class(**{k: v for k, v in SMALL.items() if k in names}), dtype=torch.float32)
        if sum(parameter.numel() for parameter in network.parameters()) <= MOST_PARAMETERS:
            return network
    except Exception:  # of whatever kind the class's own checks raise
        pass
    return build_network(config_class(), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_causal_model_is_refused_or_stays_what_it_is(kind: str, record_property: Row) -> None:
    record_property(ROW, f"causal model {kind}")
    try:
        network = build(CONFIGS[kind])
    except Exception as error:  # as above
        record_property("said", f"transformers: {type(error).__name__} {error}".splitlines()[0])
        return
    try:
        find_spec(network)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        record_property("said", refusal.partition("; supported: ")[0])
        assert refusal.startswith(f"model_type={kind}: ")
        assert "\n" not in refusal
        assert kind not in PLACED
        return
    check(from_config(network.config), record=record_property)


def check(source: Any, *, record: Row) -> None:
    """Check that every rotation acts and changes nothing, or is refused or left out by the name of a part."""
    names = parts_of(source)
    for column, rotation in PLACEMENTS.items():
        error, said = outcome(source, rotation)
        record(column, "refused" if error is None else error)
        for text in said:
            record("said", text.rpartition(f"model_type={source.config.model_type}: ")[2].partition("; set ")[0])
            assert any(name in text for name in names), text
        assert error is None or error <= EXACT, (column, error, said)


def parts_of(source: Any) -> list[str]:
    """Return what a refusal may name: norms, the embedding, and the model's class."""
    names = {name.rpartition(".")[2] for name, _ in source.named_modules()}
    return [type(source).__name__, *(name for name in names if "norm" in name or "embed" in name)]
