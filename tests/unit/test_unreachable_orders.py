"""What is said of a width that has no Hadamard matrix, and that following it works."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2MoeConfig

from rotexp.models.arch import find_spec
from rotexp.quant.options import QuantConfig
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.placement import place

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 31,
    "tie_word_embeddings": False,
}
UNKNOWN = "no construction known here for order"
NO_30 = (
    "no Hadamard matrix of order 30 exists: the order must be 1, 2 or a multiple of 4 "
    "(the nearest orders are 28 and 32)"
)
ALL = RotationConfig(r4=True)


def placed(rotation: RotationConfig, **shape: Any) -> RotatedModel:
    config = Qwen2MoeConfig if "num_experts" in shape else LlamaConfig
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config(**SHAPE | shape))
    return place(network, find_spec(network), rotation, QuantConfig(), seed=0)


def refusal(rotation: RotationConfig, **shape: Any) -> str:
    with pytest.raises(ValueError, match="set rotation") as caught:
        placed(rotation, **shape)
    return str(caught.value)


def block_advised(message: str) -> int:
    found = re.search(r" or rotation\.block_size=(\d+) \(the largest that R1 and R4 can both have\)$", message)
    assert found is not None, message
    return int(found[1])


def test_a_residual_stream_without_hadamard_matrix() -> None:
    shape = {"hidden_size": 668, "intermediate_size": 1336}
    message = refusal(ALL, **shape)
    assert message.startswith(
        f"rotation.init=hadamard: R1 cannot start so: {UNKNOWN} 668 (the nearest orders are 664 and 672); set "
        "rotation.init=random or rotation.r1=false or rotation.block_size=4 ("
    )
    blocks = placed(replace(ALL, block_size=block_advised(message)), **shape)
    assert dict(blocks.bank.items())["R1"].shape == (167, 4, 4)
    assert blocks.online == {"R4": 4}
    learned = replace(ALL, r4=False)
    assert dict(placed(replace(learned, init=RotationInit.random), **shape).bank.items())["R1"].shape == (668, 668)
    assert "R1" not in dict(placed(replace(learned, r1=False), **shape).bank.items())


def test_a_down_projection_without_hadamard_matrix() -> None:
    message = refusal(ALL, intermediate_size=1336)
    assert message.startswith(
        f"rotation.r4=true: cannot act: {UNKNOWN} 1336 (the nearest orders are 1332 and 1340); set rotation.r4=false "
        "or rotation.block_size=8 ("
    )
    left_out = placed(replace(ALL, r4=None), intermediate_size=1336)
    assert left_out.online == {}
    assert left_out.warnings == [message.replace("rotation.r4=true: cannot act", "R4 is left out")]
    assert placed(replace(ALL, r4=False), intermediate_size=1336).warnings == []
    blocks = placed(replace(ALL, block_size=block_advised(message)), intermediate_size=1336)
    assert blocks.online == {"R4": 8}
    assert dict(blocks.bank.items())["R1"].shape == (6, 8, 8)


@pytest.mark.parametrize(("inner", "shared", "block"), [(1336, 12, 4), (80, 668, 4), (80, 1336, 8), (1336, 24, 8)])
def test_the_block_fits_experts_and_shared_experts(inner: int, shared: int, block: int) -> None:
    experts = {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
    }
    message = refusal(ALL, **experts)
    assert block_advised(message) == block
    assert placed(replace(ALL, block_size=block), **experts).online == {"R4": block}


def test_a_block_without_hadamard_matrix_gives_way_to_one_that_has() -> None:
    message = refusal(replace(ALL, block_size=6), hidden_size=48, intermediate_size=96)
    assert message.startswith("rotation.init=hadamard: R1 cannot start so: no Hadamard matrix of order 6 exists")
    assert block_advised(message) == 48


def test_no_block_is_advised_where_none_fits_both() -> None:
    message = refusal(ALL, hidden_size=48, intermediate_size=35)
    assert message.endswith("(the nearest orders are 32 and 36); set rotation.r4=false")


def test_heads_without_hadamard_matrix() -> None:
    message = f"rotation.init=hadamard: R2_0 cannot start so: {NO_30}; set rotation.init=random or rotation.r2=false"
    assert refusal(RotationConfig(), head_dim=30) == message
    assert "R2_0" in placed(RotationConfig(init=RotationInit.random), head_dim=30).placements
    assert "R2_0" not in placed(RotationConfig(r2=False), head_dim=30).placements
    keys = RotationConfig(r2=False, r3=True)
    assert refusal(keys, head_dim=30) == f"rotation.r3=true: cannot act: {NO_30}; set rotation.r3=false"
    automatic = placed(replace(keys, r3=None), head_dim=30)
    assert automatic.warnings == [f"R3 is left out: {NO_30}"]
    assert automatic.online == {}
