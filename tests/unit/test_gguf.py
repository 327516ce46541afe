"""GGUF files open only if every tensor is known, are read tensor by tensor, and equal what transformers reads."""

from __future__ import annotations

import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from test_loading_files import SHAPE, asked, assert_equals_transformers, opened, refusal
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from rotexp.models.load import build_model, resolve_model, summarize_model
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelDtype

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
SMALL = SHAPE | {"intermediate_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "head_dim": 8}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3moe": Qwen3MoeConfig(**SMALL, **EXPERTS),
    "gemma2": Gemma2Config(**SMALL, head_dim=8),
}
"""What transformers' names and shapes are found by; Llama's queries and keys are permuted, Gemma's gains lack one."""


def gguf_name(name: str, architecture: str) -> str:
    after = "post_attention_norm" if architecture == "gemma2" else "ffn_norm"
    name = re.sub(r"^model\.layers\.", "blk.", name).replace("post_attention_layernorm", after)
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def write_gguf(
    file: Path,
    *,
    architecture: str = "qwen2",
    tied: bool = False,
    extra: tuple[str, ...] = (),
    lost: str = "",
    kv_heads: int | None = 2,
) -> None:
    """Write a random model of one layer; linears as Q4_1, values as Q8_0, embedding and head as F16, norms as F32."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("small")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_block_count, 1),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, kv_heads),
        (writer.add_vocab_size, 61),
        (writer.add_key_length, 8),
        (writer.add_expert_count, 4 if architecture == "qwen3moe" else None),
        (writer.add_expert_used_count, 2 if architecture == "qwen3moe" else None),
        (writer.add_expert_feed_forward_length, 768 if architecture == "qwen3moe" else None),
    ):
        if value is not None:
            add(value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    shapes = {name: shape for name, shape in gguf_shapes(architecture, kv_heads or 4).items() if name != lost}
    generator = np.random.default_rng(0)
    for name, shape in (shapes | dict.fromkeys(extra, (4,))).items():
        if tied and name == "output.weight":
            continue
        data, kind = generator.normal(size=shape).astype(np.float32), grid_of(name)
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def grid_of(name: str) -> Type:
    if name.endswith("bias") or "norm" in name or "rope" in name:
        return Type.F32
    if name.startswith(("token_embd", "output")):
        return Type.F16
    return Type.Q8_0 if "attn_v" in name else Type.Q4_1


def gguf_shapes(architecture: str, kv_heads: int) -> dict[str, tuple[int, ...]]:
    config = type(CONFIGS[architecture])(**CONFIGS[architecture].to_dict() | {"num_key_value_heads": kv_heads})
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters():
        named, shape = gguf_name(name, architecture), tuple(parameter.shape)
        if named.endswith("experts.gate_up_proj"):
            halves = (shape[0], shape[1] // 2, shape[2])
            shapes |= {f"blk.0.ffn_{part}_exps.weight": halves for part in ("gate", "up")}
        else:
            shapes[named] = shape
    return shapes


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_equals_transformers_and_names_its_grids(tmp_path: Path, architecture: str, tied: bool) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture=architecture, tied=tied)
    checkpoint = opened(file)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert_equals_transformers(checkpoint, reference)
    layer = "model.layers.0"
    linears = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    q4_1 = {f"{layer}.{name}.weight": "Q4_1" for name in (*linears, "mlp.down_proj")}
    assert checkpoint.coarse == q4_1 | {f"{layer}.self_attn.v_proj.weight": "Q8_0"}
    model = resolve_model(asked(file, dtype=ModelDtype.auto), checkpoint)
    assert model.dtype is ModelDtype.float32
    assert summarize_model(model, checkpoint)["coarse"] == {"Q4_1": 6, "Q8_0": 1}


def test_gguf_tensors_that_transformers_would_pass_over_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", architecture="llama", extra=("rope_freqs.weight",))
    message = refusal(tmp_path / "model.gguf")
    assert "not understood by transformers: rope_freqs.weight; give the model as safetensors" in message


def test_parameters_that_a_gguf_file_lacks_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", lost="blk.0.ffn_up.weight")
    assert "missing: model.layers.0.mlp.up_proj.weight; give" in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no GGUF at all" * 9])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert refusal(file).startswith(f"model.path={file}: transformers cannot read this GGUF file (")


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:-4000])
    assert refusal(file).startswith(f"model.path={file}: transformers cannot read this GGUF file (")


def test_a_gguf_architecture_that_transformers_cannot_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "plamo")
    writer.add_name("small")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "plamo" in refusal(file)


@pytest.mark.parametrize("architecture", ["qwen3moe", "gemma2"])
def test_what_transformers_rearranges_comes_out_as_there(tmp_path: Path, architecture: str) -> None:
    """Two stored tensors make one parameter of experts; a stored gain is one more than the parameter."""
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture=architecture, tied=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert_equals_transformers(opened(file), reference)


def test_queries_and_keys_are_put_in_order_where_the_file_is_silent_on_kv_heads(tmp_path: Path) -> None:
    """transformers forgets to where the file says nothing of them, although each head then has its own."""
    write_gguf(tmp_path / "silent.gguf", architecture="llama", kv_heads=None)
    write_gguf(tmp_path / "plain.gguf", architecture="llama", kv_heads=4)
    silent, plain = (opened(tmp_path / f"{name}.gguf") for name in ("silent", "plain"))
    assert all(torch.equal(silent.read(name), plain.read(name)) for name in plain.weights.shapes())


class Alive:
    """Counts the dequantized arrays that are alive whenever another one is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.count = 0
        self._arrays: list[Any] = []
        self._dequantize = gguf.dequantize
        monkeypatch.setattr(gguf, "dequantize", self)

    def __call__(self, data: Any, kind: Any) -> Any:
        array = self._dequantize(data, kind)
        self._arrays = [*(kept for kept in self._arrays if kept() is not None), weakref.ref(array)]
        self.most, self.count = max(self.most, len(self._arrays)), self.count + 1
        return array


@pytest.mark.parametrize(("architecture", "most"), [("llama", 1), ("qwen3moe", 2)])
def test_one_tensor_at_a_time_is_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, most: int
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture=architecture)
    checkpoint = opened(file)
    checkpoint.weights.release()
    network: Any = build_model(checkpoint, dtype=torch.float32)
    alive = Alive(monkeypatch)
    materialize(network, checkpoint, device=torch.device("cpu"))
    assert alive.count == len(gguf_shapes(architecture, 2))
    assert alive.most <= most


def test_nothing_but_a_row_of_each_type_is_dequantized_to_open_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture="llama")
    rows: list[int] = []
    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: rows.append(len(data)) or dequantize(data, kind))
    opened(file)
    assert rows == [1] * 4  # F32, F16, Q4_1, Q8_0


def test_rows_hold_no_more_memory_than_themselves_and_another_process_reads_the_same(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture="llama")
    weights = opened(file).weights
    name = "model.layers.0.self_attn.q_proj.weight"
    part = weights.read(name, slice(3, 5))
    assert part.untyped_storage().nbytes() == 2 * 32 * 4
    handed = pickle.loads(pickle.dumps(weights))
    assert torch.equal(handed.read(name)[3:5], part)
    assert len(pickle.dumps(weights)) < file.stat().st_size


def test_a_type_that_cannot_be_dequantized_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture="llama")
    reader = gguf.GGUFReader(file, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_norm.weight")
    tensor.field.parts[4][0] = Type.I32  # as wide as what it was written as
    reader.data.flush()
    message = refusal(file)
    assert "Dequantization for I32 is not yet implemented" in message
