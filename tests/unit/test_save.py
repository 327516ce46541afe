"""A saved model is a plain checkpoint: transformers reads it, it computes the same, and it is complete or absent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from rotexp.models import tiny
from rotexp.models.save import save_checkpoint

Factory = Callable[..., Any]
TIED = {"tie_word_embeddings": True}


def load(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Every tensor apart, as a merged model has them: the head is never tied."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def save(folder: Path, model: Any, tensors: dict[str, Tensor] | None = None, **options: Any) -> None:
    save_checkpoint(folder, tensors or tensors_of(model), model.config, **{"dtype": torch.float32} | options)


def assert_equal(model: Any, tensors: dict[str, Tensor]) -> None:
    assert model.state_dict().keys() == tensors.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize("options", [{}, TIED, {"attention_bias": True, "mlp_bias": True}])
def test_plain_transformers_reads_the_same_model(
    options: dict[str, Any], llama: Factory, token_ids: Tensor, tmp_path: Path
) -> None:
    source = llama(**options)
    save(tmp_path / "saved", source)
    loaded = load(tmp_path / "saved")
    assert_equal(loaded, tensors_of(source))
    assert torch.equal(loaded(token_ids).logits, source(token_ids).logits)


def test_a_tied_head_is_left_out_and_tied_again(llama: Factory, tmp_path: Path) -> None:
    save(tmp_path / "saved", llama(**TIED))
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    loaded = load(tmp_path / "saved")
    assert loaded.config.tie_word_embeddings is True
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_head_that_left_the_embedding_is_stored_and_untied(llama: Factory, tmp_path: Path) -> None:
    source = llama(**TIED)
    tensors = tensors_of(source)
    tensors["lm_head.weight"] *= 1.5
    save(tmp_path / "saved", source, tensors)
    loaded = load(tmp_path / "saved")
    assert loaded.config.tie_word_embeddings is False
    assert_equal(loaded, tensors)
    assert source.config.tie_word_embeddings is True


def test_an_untied_head_stays_untied_though_it_equals_the_embedding(llama: Factory, tmp_path: Path) -> None:
    source = llama()
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save(tmp_path / "saved", source, tensors)
    loaded = load(tmp_path / "saved")
    assert loaded.config.tie_word_embeddings is False
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert_equal(loaded, tensors)


def test_storages_are_not_shared(llama: Factory, tmp_path: Path) -> None:
    """Slices of one tensor come out as tensors of their own, of their own size."""
    source = llama()
    tensors = tensors_of(source)
    whole = torch.randn(4, 80, 48)
    names = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in (0, 1) for name in ("gate", "up")]
    tensors |= dict(zip(names, whole, strict=True))
    save(tmp_path / "saved", source, tensors)
    assert_equal(load(tmp_path / "saved"), tensors)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored < (tmp_path / "saved" / "model.safetensors").stat().st_size < stored + 10_000


def test_the_config_says_nothing_of_how_the_source_was_stored_or_run(llama: Factory, tmp_path: Path) -> None:
    source = llama()
    source.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    source.config._attn_implementation = "eager"
    source.config.auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    save(tmp_path / "saved", source)
    config = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert not [key for key in config if "quant" in key or "attn" in key or "auto" in key]
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert source.config.quantization_config["bits"] == 4
    assert load(tmp_path / "saved").config._attn_implementation == "sdpa"


def test_a_model_is_split_into_files_of_the_size_asked_for(llama: Factory, tmp_path: Path) -> None:
    source = llama()
    save(tmp_path / "saved", source, max_shard_size="40KB")
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert_equal(load(tmp_path / "saved"), tensors_of(source))


def test_experts_go_back_to_tensors_of_their_own(token_ids: Tensor, tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    source = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    save(tmp_path / "saved", source)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in experts
    loaded = load(tmp_path / "saved")
    assert_equal(loaded, tensors_of(source))
    with torch.no_grad():
        assert torch.equal(loaded(token_ids).logits, source(token_ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_stored_in_the_dtype_asked_for(dtype: torch.dtype, llama: Factory, tmp_path: Path) -> None:
    source = llama()
    save(tmp_path / "saved", source, dtype=dtype)
    loaded = load(tmp_path / "saved")
    assert loaded.dtype == dtype
    assert_equal(loaded, {name: tensor.to(dtype) for name, tensor in tensors_of(source).items()})


def test_weights_beyond_the_dtype_are_refused(llama: Factory, tmp_path: Path) -> None:
    source = llama()
    tensors = tensors_of(source)
    tensors["model.norm.weight"][3] = 70_000
    with pytest.raises(ValueError, match=r"^export.dtype=float16: model.norm.weight has values beyond it; choose bf"):
        save(tmp_path / "saved", source, tensors, dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_to_a_model_is_saved_with_it(llama: Factory, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.FOLDER)
    generation = tmp_path / "theirs.json"
    generation.write_text('{"temperature": 0.6, "do_sample": false}\n', encoding="utf-8")
    copied = {"generation_config.json": generation}
    save(tmp_path / "saved", llama(), tokenizer=tokenizer, copied=copied, manifest={"seed": 3})
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded("A rotation, once.").input_ids == tokenizer("A rotation, once.").input_ids
    assert (tmp_path / "saved" / "generation_config.json").read_text() == generation.read_text()
    assert json.loads((tmp_path / "saved" / "rotexp_manifest.json").read_text()) == {"seed": 3}


def test_every_tensor_that_does_not_fit_the_plain_model_is_named(llama: Factory, tmp_path: Path) -> None:
    source = llama()
    tensors = tensors_of(source) | {"rotation_bank.R1": torch.eye(48), "model.norm.weight": torch.ones(47)}
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM: the merged model does not fit it: ") as end:
        save(tmp_path / "saved", source, tensors)
    for fault in ("lm_head.weight is missing", "rotation_bank.R1 has no place", "weight is [47] instead of [48]"):
        assert fault in str(end.value)
    assert list(tmp_path.iterdir()) == []


def test_shapes_are_those_of_the_source(llama: Factory, tmp_path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(llama()).items()}
    save(tmp_path / "saved", llama(), source_shapes=shapes | {"rotary_emb.inv_freq": (4,)})
    with pytest.raises(ValueError, match=r"shapes are not the source's: model.norm.weight is \[48\] instead of \[3\]"):
        save(tmp_path / "other", llama(), source_shapes=shapes | {"model.norm.weight": (3,)})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_place_that_holds_something_is_refused_and_left(llama: Factory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    with pytest.raises(ValueError, match=r"^export.path=.*/file: is a file; name a folder to make"):
        save(tmp_path / "file", llama())
    with pytest.raises(ValueError, match=r"^export.path=.*/folder: is a folder that is not empty; choose another"):
        save(tmp_path / "folder", llama())
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["kept"]
    assert (tmp_path / "file").read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_is_taken_and_missing_parents_are_made(llama: Factory, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b"):
        save(folder, llama())
        assert load(folder).config.hidden_size == 48


@pytest.mark.parametrize("failure", [OSError("No space left on device"), KeyboardInterrupt(), RuntimeError("a defect")])
def test_a_failure_in_the_middle_leaves_nothing(failure: BaseException, llama: Factory, tmp_path: Path) -> None:
    seen: list[str] = []

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            seen.extend(path.name for path in folder.iterdir())
            raise failure

    with pytest.raises(type(failure)):
        save(tmp_path / "saved", llama(), tokenizer=Tokenizer())
    assert "model.safetensors" in seen
    assert list(tmp_path.iterdir()) == []


def test_files_may_be_read_by_those_who_may_read_others(llama: Factory, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save(tmp_path / "saved", llama())
    assert {path.stat().st_mode for path in (tmp_path / "saved").iterdir()} == {(tmp_path / "other").stat().st_mode}
