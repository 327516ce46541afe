"""Whatever form a checkpoint has, what is read equals what transformers reads of it, bit for bit; or it is refused."""

import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import hydra
import pytest
import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SiglipVisionConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

from rotexp.config.composition import to_config
from rotexp.launch.command_line import register
from rotexp.launch.start import start
from rotexp.models import tiny
from rotexp.models.load import build_model, open_checkpoint, resolve_model, summarize_model
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelDtype, ModelSource
from rotexp.models.save import companions
from rotexp.models.stored_model import ExpertStack, StoredModel
from rotexp.models.weight_files import FileWeights

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
OPT = {key: value for key, value in SHAPE.items() if key not in ("intermediate_size", "num_key_value_heads")}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "opt": OPTConfig(**OPT, ffn_dim=48, word_embed_proj_dim=32),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
    "qwen3 tied": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
}
NESTED: dict[str, Any] = {
    "gemma3": Gemma3Config(text_config={**SHAPE, "head_dim": 8}, vision_config=VISION, mm_tokens_per_image=4),
    "llava": LlavaConfig(
        text_config=LlamaConfig(**SHAPE, tie_word_embeddings=False), vision_config=SiglipVisionConfig(**VISION)
    ),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a model whose every parameter is random, once for each kind; each caller gets a copy to spoil."""
    kept: dict[Any, Path] = {}

    def save(kind: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB") -> Path:
        key = (kind, dtype, shard_size)
        if key not in kept:
            kept[key] = tmp_path_factory.mktemp("saved")
            auto: Any = AutoModelForImageTextToText if kind in NESTED else AutoModelForCausalLM
            model = auto.from_config((CONFIGS | NESTED)[kind], dtype=dtype)
            randomize(model)
            model.save_pretrained(kept[key], max_shard_size=shard_size)
        return Path(shutil.copytree(kept[key], tmp_path_factory.mktemp("copy") / "model"))

    return save


@torch.no_grad()
def randomize(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.normal_(generator=generator)


def asked(path: Path | str, **options: Any) -> ModelConfig:
    return ModelConfig("hf", ModelSource.hf, str(path), **options)


def opened(path: Path | str, **options: Any) -> StoredModel:
    return open_checkpoint(asked(path, **options), seed=0)


def refusal(path: Path | str, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"^model") as caught:
        opened(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_equals_transformers(checkpoint: StoredModel, reference: Any) -> None:
    """Compare every parameter, read whole and row by row, and the logits."""
    network: Any = build_model(checkpoint, dtype=reference.dtype)
    materialize(network, checkpoint, device=torch.device("cpu"))
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in network.named_parameters():
        whole = checkpoint.read(name)
        assert whole.dtype == expected[name].dtype
        assert torch.equal(whole, expected[name]), name
        assert torch.equal(parameter, expected[name]), name
        for rows in (slice(0, 1), slice(1, 3), slice(2, 2)):
            assert torch.equal(checkpoint.read(name, rows), expected[name][rows]), name
    token_ids = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(network(token_ids).logits, reference.eval()(token_ids).logits)


def reference_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def store(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickled(folder: Path, *, shards: int = 1) -> Path:
    """Put the weights of a folder into one or several `pytorch_model.bin` instead."""
    tensors = stored(folder)
    for file in folder.glob("model*"):
        file.unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    file_of = {name: f"pytorch_model-{index % shards}.bin" for index, name in enumerate(tensors)}
    for file_name in set(file_of.values()):
        torch.save({name: tensors[name] for name in tensors if file_of[name] == file_name}, folder / file_name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_folder_of_safetensors_equals_transformers(
    model_folder: Callable[..., Path], kind: str, dtype: torch.dtype, shard_size: str
) -> None:
    folder = model_folder(kind, dtype=dtype, shard_size=shard_size)
    assert (folder / "model.safetensors.index.json").exists() is (shard_size != "1GB")
    assert_equals_transformers(opened(folder), reference_of(folder))


@pytest.mark.parametrize("kind", ["opt", "mixtral"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_pickled_weights_equals_transformers(
    model_folder: Callable[..., Path], kind: str, shards: int
) -> None:
    folder = pickled(model_folder(kind), shards=shards)
    checkpoint = opened(folder)
    assert_equals_transformers(pickle.loads(pickle.dumps(checkpoint)), reference_of(folder))


def test_safetensors_are_preferred_to_pickled_weights(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert_equals_transformers(opened(folder), reference_of(folder))


def test_one_file_is_opened_with_the_config_beside_it(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    reference = reference_of(folder)
    file = folder / "model.safetensors"
    checkpoint = opened(file.rename(folder / "other.safetensors"))
    assert (checkpoint.identity, checkpoint.tokenizer) == (f"{folder}/other.safetensors", str(folder))
    assert_equals_transformers(checkpoint, reference)
    torch.save(load_file(folder / "other.safetensors"), folder / "other.bin")
    assert_equals_transformers(opened(folder / "other.bin"), reference)


def test_one_file_of_several_is_not_a_model(model_folder: Callable[..., Path]) -> None:
    file = sorted(model_folder("llama", shard_size="20KB").glob("*.safetensors"))[0]
    assert "tensors do not fit its config.json; missing: " in refusal(file)


@pytest.mark.parametrize("kind", ["llama", "opt", "mixtral", "qwen3_moe"])
def test_weights_saved_from_the_base_model_are_found(model_folder: Callable[..., Path], kind: str) -> None:
    folder = model_folder(kind)
    reference = reference_of(folder)
    store(folder, {name.removeprefix("model."): tensor for name, tensor in stored(folder).items()})
    assert_equals_transformers(opened(folder), reference)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_are_stored_fused_are_read_by_rows(model_folder: Callable[..., Path], kind: str) -> None:
    folder = model_folder(kind)
    reference = reference_of(folder)
    store(folder, {name: tensor.contiguous() for name, tensor in reference.state_dict().items()})
    checkpoint = opened(folder)
    assert checkpoint.aliases == {}
    assert_equals_transformers(checkpoint, reference)


class Counted:
    """Weights that remember what was read of them."""

    def __init__(self, weights: FileWeights) -> None:
        self.weights = weights
        self.names: list[str] = []

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.weights.shapes()

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        self.names.append(name)
        return self.weights.read(name, rows)


def test_only_the_experts_that_are_asked_for_are_read(model_folder: Callable[..., Path]) -> None:
    checkpoint = opened(model_folder("mixtral"))
    counted = Counted(checkpoint.weights)  # type: ignore[arg-type]
    place = "model.layers.1.block_sparse_moe.experts"
    assert isinstance(checkpoint.aliases["model.layers.1.mlp.experts.gate_up_proj"], ExpertStack)
    part = replace(checkpoint, weights=counted).read("model.layers.1.mlp.experts.gate_up_proj", slice(1, 2))
    assert part.shape == (1, 96, 32)
    assert counted.names == [f"{place}.1.w1.weight", f"{place}.1.w3.weight"]


def multimodal_layouts(kind: str) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield the ways in which multimodal checkpoints name their tensors, each from how transformers saves them."""
    yield "as saved", lambda name: name
    yield (
        "newer",
        lambda name: (
            name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "model.language_model.")
            if name.startswith("language_model.")
            else f"model.{name}"
        ),
    )
    if kind == "gemma3":
        yield "base", lambda name: name.replace("language_model.model.", "language_model.")


@pytest.mark.parametrize(
    ("kind", "layout", "rename"),
    [(kind, layout, rename) for kind in NESTED for layout, rename in multimodal_layouts(kind)],
    ids=lambda value: value if isinstance(value, str) else "renamed",
)
def test_the_language_model_of_a_multimodal_checkpoint_is_read(
    model_folder: Callable[..., Path], kind: str, layout: str, rename: Callable[[str], str]
) -> None:
    folder = model_folder(kind, dtype=torch.bfloat16)
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_config(NESTED[kind].get_text_config(), dtype=torch.bfloat16)
    parts = {f"model.{name}": tensor for name, tensor in whole.model.language_model.state_dict().items()}
    reference.load_state_dict(parts | {"lm_head.weight": whole.lm_head.weight})
    store(folder, {rename(name): tensor for name, tensor in stored(folder).items()})
    checkpoint = opened(folder)
    assert checkpoint.config.model_type == {"gemma3": "gemma3_text", "llava": "llama"}[kind]
    assert checkpoint.dtype == torch.bfloat16
    assert_equals_transformers(checkpoint, reference)


def test_the_language_tensors_of_a_multimodal_checkpoint_are_still_checked(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llava")
    tensors = stored(folder)
    prefix = "language_model.model"
    tensors[f"{prefix}.layers.7.extra"] = torch.ones(2)
    del tensors[f"{prefix}.norm.weight"]
    store(folder, tensors)
    assert refusal(folder).endswith(f"missing: model.norm.weight; unexpected: {prefix}.layers.7.extra")


def test_the_tensors_of_other_parts_are_refused_in_a_text_model(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    store(folder, stored(folder) | {"vision_tower.patch.weight": torch.ones(2)})
    assert refusal(folder).endswith("unexpected: vision_tower.patch.weight")


def test_a_multimodal_model_whose_language_model_stands_not_alone_is_refused(tmp_path: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path)
    message = refusal(tmp_path)
    kind = "model_type=qwen2_vl_text (the language model of qwen2_vl)"
    assert message.startswith(f"model.path={tmp_path}/config.json: {kind}: transformers has no causal ")


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.1.down_proj.weight"),
    ],
)
def test_a_missing_expert_or_router_is_named(model_folder: Callable[..., Path], kind: str, lost: str) -> None:
    folder = model_folder(kind)
    tensors = stored(folder)
    del tensors[lost]
    store(folder, tensors)
    named = lost if "experts" in lost else "model.layers.0.mlp.gate.weight"
    assert refusal(folder).endswith(f"config.json; missing: {named}")


def test_experts_too_many_or_of_another_shape_are_named(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("qwen3_moe")
    tensors = stored(folder)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"] = torch.ones(24, 32)
    tensors["model.layers.1.mlp.experts.0.gate_proj.weight"] = torch.ones(23, 32)
    store(folder, tensors)
    message = refusal(folder)
    assert "unexpected: model.layers.0.mlp.experts.3.up_proj.weight; " in message
    assert "model.layers.1.mlp.experts.0.gate_proj.weight ([23, 32] instead of [24, 32])" in message


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x80\x02}q\x00."])
def test_pickled_weights_that_cannot_be_read_are_named(model_folder: Callable[..., Path], content: bytes) -> None:
    folder = pickled(model_folder("llama"))
    (folder / "pytorch_model.bin").write_bytes(content)
    assert refusal(folder).startswith(f"model.path={folder}/pytorch_model.bin: cannot be read as torch tensors (")


def test_truncated_pickled_weights_are_refused(model_folder: Callable[..., Path]) -> None:
    file = pickled(model_folder("llama")) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(file).startswith(f"model.path={file}: cannot be read as torch tensors (")


@pytest.mark.parametrize("held", [{"model": {"norm": torch.ones(2)}}, [torch.ones(2)], torch.ones(2)])
def test_pickled_weights_that_are_no_state_dict_are_refused(model_folder: Callable[..., Path], held: object) -> None:
    folder = pickled(model_folder("llama"))
    torch.save(held, folder / "pytorch_model.bin")
    assert "must hold tensors by name and nothing else" in refusal(folder)


def test_a_shard_that_a_pickled_index_names_but_is_absent_is_named(model_folder: Callable[..., Path]) -> None:
    folder = pickled(model_folder("llama"), shards=3)
    (folder / "pytorch_model-1.bin").unlink()
    assert refusal(folder).startswith(f"model.path={folder}: pytorch_model-1.bin of its index is missing")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_a_quantized_checkpoint_is_refused(model_folder: Callable[..., Path], method: str, inside: bool) -> None:
    folder = model_folder("llava" if inside else "llama")
    config = json.loads((folder / "config.json").read_text())
    (config["text_config"] if inside else config)["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder)
    assert message.startswith(f"model.path={folder}/config.json: its weights are stored quantized ({method}); ")
    assert message.endswith("give the unquantized checkpoint")


@pytest.mark.parametrize("changed", [{"hidden_size": "wide"}, {"num_attention_heads": 5}, {"hidden_act": "unheard"}])
def test_a_config_that_cannot_be_built_is_refused_in_one_line(
    model_folder: Callable[..., Path], changed: dict[str, Any]
) -> None:
    folder = model_folder("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    assert refusal(folder).startswith(f"model.path={folder}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stated", [True, False])
def test_auto_keeps_the_checkpoints_dtype_and_records_it(
    model_folder: Callable[..., Path], dtype: torch.dtype, stated: bool
) -> None:
    folder = model_folder("llama", dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    assert f"torch.{config.pop('dtype')}" == str(dtype)
    if not stated:
        (folder / "config.json").write_text(json.dumps(config))
    checkpoint = opened(folder)
    resolved = resolve_model(asked(folder, dtype=ModelDtype.auto), checkpoint)
    assert f"torch.{resolved.dtype.name}" == str(dtype)
    assert resolve_model(asked(folder, dtype=ModelDtype.float16), checkpoint).dtype is ModelDtype.float16
    assert summarize_model(resolved, checkpoint)["dtype"] == resolved.dtype.name


def test_a_dtype_in_which_models_are_not_held_must_be_chosen(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"model.dtype=auto: .* is in float64; must be one of float32, bfloat16, "):
        resolve_model(asked(folder, dtype=ModelDtype.auto), opened(folder))


def test_a_relative_folder_is_recorded_whole(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    monkeypatch.chdir(folder.parent)
    assert resolve_model(asked("model"), opened("model")).path == str(folder)


def test_a_local_folder_has_no_revision(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    assert opened(folder).revision is None
    assert refusal(folder, revision="main") == f"model.revision=main: must be null for the local {folder}; leave it out"


COMMIT = "9f3c0de" * 5 + "12345"


class Hub:
    """Stands in for the hub: one repository, of which a snapshot holds what was asked for."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote = remote
        self.snapshot = cache / "models--some--model" / "snapshots" / COMMIT
        self.revisions: list[str | None] = []

    def snapshot_download(
        self, repository: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert repository == "some/model"
        self.revisions.append(revision)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        names = [str(file.relative_to(self.remote)) for file in self.remote.rglob("*") if file.is_file()]
        for name in huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (self.snapshot / name).parent.mkdir(exist_ok=True)
            shutil.copy(self.remote / name, self.snapshot / name)
        return str(self.snapshot)

    def fetched(self) -> set[str]:
        return {str(file.relative_to(self.snapshot)) for file in self.snapshot.rglob("*") if file.is_file()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], Hub]:
    def put(remote: Path) -> Hub:
        made = Hub(remote, tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
        return made

    return put


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_the_commit_of_a_hub_model_is_resolved_recorded_and_asked_for_again(
    model_folder: Callable[..., Path], hub: Callable[[Path], Hub], revision: str | None
) -> None:
    folder = model_folder("llama")
    repository = hub(folder)
    asked_for = asked("some/model", revision=revision)
    checkpoint = open_checkpoint(asked_for, seed=0)
    assert repository.revisions == [revision, COMMIT, COMMIT]
    assert (checkpoint.identity, checkpoint.revision) == ("some/model", COMMIT)
    resolved = resolve_model(asked_for, checkpoint)
    assert (resolved.path, resolved.revision) == ("some/model", COMMIT)
    assert summarize_model(resolved, checkpoint) == {
        "id": "some/model",
        "revision": COMMIT,
        "dtype": "float32",
        "model_type": "llama",
        "coarse": {},
        "coarse_parameters": {},
    }
    open_checkpoint(resolved, seed=0)
    assert set(repository.revisions[3:]) == {COMMIT}
    assert_equals_transformers(checkpoint, reference_of(folder))


@pytest.fixture
def small_repository(hub: Callable[[Path], Hub], tmp_path: Path) -> Hub:
    """A random model on the hub with the tokenizer of the tiny one."""
    folder = tmp_path / "remote"
    shutil.copytree(tiny.FOLDER, folder, ignore=lambda _, names: [name for name in names if "tokenizer" not in name])
    config = LlamaConfig(**SHAPE | {"vocab_size": 2048})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return hub(folder)


def test_a_run_records_the_commit_and_the_dtype_it_found(
    small_repository: Hub, own_logging: None, tmp_path: Path
) -> None:
    data = ["data=text", "data.sequence_length=16"]
    for name in ("calibration", "evaluation"):
        (tmp_path / name).write_text(f"a few words of {name} and again " * 40, encoding="utf-8")
        data.append(f"data.{name}={tmp_path / name}")
    work = ["rotation=hadamard", "evaluation.window=16", "evaluation.max_windows=1", "data.global_batch_size=1"]
    model = [
        "model=hf",
        "model.path=some/model",
        "model.dtype=auto",
        "launch=inline",
        "launch.threads=1",
        "tracker=jsonl",
    ]
    register()
    with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
        config = to_config(hydra.compose("config", overrides=[*model, *data, *work]))
    folder = tmp_path / "run"
    assert start(config, folder) == 0
    logging.shutdown()
    resolved = OmegaConf.load(folder / "config.resolved.yaml")
    assert (resolved.model.path, resolved.model.revision, resolved.model.dtype) == ("some/model", COMMIT, "bfloat16")
    recorded = json.loads((folder / "summary.json").read_text())["model"]
    assert (recorded["id"], recorded["revision"], recorded["dtype"]) == ("some/model", COMMIT, "bfloat16")
    with safe_open(folder / "rotations.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["model"], metadata["revision"], metadata["dtype"]) == ("some/model", COMMIT, "bfloat16")


def test_pickled_weights_are_fetched_only_where_there_are_no_safetensors(
    model_folder: Callable[..., Path], hub: Callable[[Path], Hub]
) -> None:
    folder = model_folder("opt")
    torch.save(stored(folder), folder / "pytorch_model.bin")
    for name in ("consolidated.safetensors", "training_args.bin", "flax_model.msgpack"):
        (folder / name).write_bytes(b"unwanted")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"unwanted")
    repository = hub(folder)
    opened("some/model")
    assert repository.fetched() == {"config.json", "generation_config.json", "model.safetensors"}
    (folder / "model.safetensors").unlink()
    (repository.snapshot / "model.safetensors").unlink()
    assert_equals_transformers(opened("some/model"), reference_of(folder))
    assert repository.fetched() == {"config.json", "generation_config.json", "pytorch_model.bin"}


def test_a_copy_in_another_precision_is_no_reason_to_leave_out_the_pickled_weights(
    model_folder: Callable[..., Path], hub: Callable[[Path], Hub]
) -> None:
    folder = model_folder("opt")
    torch.save(stored(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    repository = hub(folder)
    assert_equals_transformers(opened("some/model"), reference_of(folder))
    assert "pytorch_model.bin" in repository.fetched()


def test_every_file_of_a_tokenizer_is_fetched_and_no_code(
    model_folder: Callable[..., Path], hub: Callable[[Path], Hub]
) -> None:
    folder = model_folder("llama")
    tokenizer = {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
        *(
            "merges.txt",
            "vocab.txt",
            "vocab.bpe",
            "qwen.tiktoken",
            "tokenizer.model",
            "spiece.model",
            "tokenizer.model.v3",
        ),
        *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja", "source.spm"),
    }
    others = {"README.md", "LICENSE.txt", "modeling_own.py", "tokenizer.py", "onnx/vocab.json", "onnx/a.jinja"}
    for name in tokenizer | others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
    repository = hub(folder)
    checkpoint = opened("some/model")
    assert repository.fetched() == tokenizer | {"config.json", "generation_config.json", "model.safetensors"}
    assert companions(checkpoint).keys() == tokenizer | {"generation_config.json"}


def test_the_progress_of_a_download_is_shown_while_it_lasts_and_what_transformers_advises_is_not(
    model_folder: Callable[..., Path],
    hub: Callable[[Path], Hub],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = model_folder("llama")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    repository, shown = hub(folder), []

    def fetch(*arguments: Any, **options: Any) -> str:
        os.write(2, b"fetching\n")
        shown.append(capfd.readouterr().err)
        return repository.snapshot_download(*arguments, **options)

    def build(*_arguments: Any, **_options: Any) -> None:
        os.write(2, b"advice\n")
        raise AssertionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", build)
    refusal("some/model")
    assert shown == ["fetching\n"] * 2
    assert capfd.readouterr().err == ""


def test_weights_of_an_unsupported_model_are_not_fetched(
    model_folder: Callable[..., Path], hub: Callable[[Path], Hub]
) -> None:
    folder = model_folder("llama")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    repository = hub(folder)
    assert refusal("some/model").startswith(f"model.path={repository.snapshot}/config.json: model_type=gpt2: ")
    assert "model.safetensors" not in repository.fetched()
