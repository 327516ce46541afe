"""Weights that are not finite, or overflow their dtype, are refused as they are read, by tensor and file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf import write_gguf
from test_loading_files import SHAPE, opened, randomize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from rotexp.models.load import build_model, open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.sharding.local_rows import largest_magnitude

CONFIGS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a random model; each caller gets a copy to spoil."""
    kept: dict[str, Path] = {}

    def save(kind: str, dtype: torch.dtype = torch.float32) -> Path:
        if kind not in kept:
            kept[kind] = tmp_path_factory.mktemp("saved")
            model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind])
            randomize(model)
            model.save_pretrained(kept[kind])
        folder = Path(shutil.copytree(kept[kind], tmp_path_factory.mktemp("copy") / "model"))
        change(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
        return folder

    return save


def change(folder: Path, how: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def spoil(folder: Path, name: str, row: int, value: float) -> None:
    change(folder, lambda tensors: tensors[name][row].view(-1)[-1].fill_(value))


def load(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    checkpoint = opened(path)
    network = build_model(checkpoint, dtype=dtype)
    materialize(network, checkpoint, device=torch.device("cpu"))
    return network


def fault(path: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ValueError, match=r"^model\.path=") as caught:
        load(path, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "name", "row"),
    [
        ("llama", HEAD, 5),
        ("llama", EMBEDDING, 60),
        ("llama", "model.norm.weight", 31),
        ("tied", EMBEDDING, 0),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight", 40),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", 2),
    ],
)
def test_one_number_that_is_not_finite_is_named_with_its_tensor_file_and_row(
    saved: Callable[..., Path], kind: str, name: str, row: int, value: float, dtype: torch.dtype
) -> None:
    folder = saved(kind, dtype)
    load(folder)
    spoil(folder, name, row, value)
    what = "nan" if value != value else "inf"
    assert fault(folder) == (
        f"model.path={folder}: {name} in model.safetensors holds {what} (row {row}); "
        "fetch the model again, or repair it"
    )


def test_the_shard_that_holds_it_is_named(saved: Callable[..., Path]) -> None:
    folder = saved("llama")
    spoil(folder, "model.layers.1.mlp.up_proj.weight", 47, torch.nan)
    tensors = load_file(folder / "model.safetensors")
    weight_map = {name: "b.safetensors" if "layers.1" in name else "a.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))
    (folder / "model.safetensors").unlink()
    assert ": model.layers.1.mlp.up_proj.weight in b.safetensors holds nan (row 47); " in fault(folder)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_that_float16_cannot_hold_is_named_with_what_it_can(
    saved: Callable[..., Path], stored: torch.dtype
) -> None:
    folder = saved("llama", stored)
    name = "model.layers.0.mlp.gate_proj.weight"
    spoil(folder, name, 7, -(2.0**17))
    assert fault(folder, torch.float16) == (
        f"model.path={folder}: {name} in model.safetensors: max |w| = 1.3107e+05 overflows model.dtype=float16, "
        f"largest 65504; set model.dtype=bfloat16"
    )
    network = load(folder, torch.bfloat16)
    assert network.get_parameter(name).min() == -(2.0**17)


def test_float16s_largest_number_is_taken_and_what_rounds_to_infinity_is_not(saved: Callable[..., Path]) -> None:
    folder = saved("llama")
    spoil(folder, HEAD, 7, 65504.0)
    assert load(folder, torch.float16).get_parameter(HEAD).max() == 65504
    spoil(folder, HEAD, 7, 65520.0)
    assert "max |w| = 65520 overflows model.dtype=float16" in fault(folder, torch.float16)


def test_what_no_dtype_of_a_model_holds_is_to_be_scaled(saved: Callable[..., Path]) -> None:
    folder = saved("llama", torch.float64)
    spoil(folder, HEAD, 7, 1e39)
    assert fault(folder).endswith(
        "max |w| = 1e+39 overflows model.dtype=float32, largest 3.4028e+38; scale the model down"
    )
    assert fault(folder, torch.float16).endswith("overflows model.dtype=float16, largest 65504; scale the model down")


def test_a_head_that_is_stored_beside_its_tied_embedding_is_checked_too(saved: Callable[..., Path]) -> None:
    folder = saved("tied")
    change(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    spoil(folder, HEAD, 60, torch.nan)
    assert f": {HEAD} in model.safetensors holds nan (row 60); " in fault(folder)


def test_what_is_stored_and_not_a_part_of_the_model_is_not_looked_at(saved: Callable[..., Path]) -> None:
    folder = saved("llama")
    change(folder, lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.full((4,), torch.nan)}))
    load(folder)


def test_pickled_weights_are_checked(saved: Callable[..., Path]) -> None:
    folder = saved("llama")
    spoil(folder, HEAD, 5, torch.nan)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert f": {HEAD} in pytorch_model.bin holds nan (row 5); " in fault(folder)


def test_gguf_weights_are_checked_and_named_as_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, architecture="llama")
    load(file)
    reader = gguf.GGUFReader(file, "r+")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tensors["blk.0.ffn_up.weight"].data[3][:2] = (0x00, 0x7E)  # the scale of a block of Q4_1, a float16
    reader.data.flush()
    assert ": blk.0.ffn_up.weight in model.gguf holds nan (row 3); fetch the model again" in fault(file)


def test_random_weights_pass() -> None:
    checkpoint = open_checkpoint(ModelConfig("random_llama", ModelSource.random, size="nano"), seed=1)
    network = build_model(checkpoint, dtype=torch.float16)
    materialize(network, checkpoint, device=torch.device("cpu"))
    assert all(parameter.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 64, 1003])
def test_the_largest_magnitude_equals_that_of_a_list_and_a_nan_is_never_passed_over(
    dtype: torch.dtype, size: int
) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert largest_magnitude(values) == max(abs(value) for value in values.tolist())
    assert largest_magnitude(values[:0]) == 0
    for place in {0, size // 2, size - 1}:
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled = values.clone()
            spoiled[place] = value
            largest = largest_magnitude(spoiled)
            assert largest != largest if value != value else largest == torch.inf
