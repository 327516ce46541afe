"""A head that is the embedding stays it where nothing parts them: one storage, one gradient, and a tied export."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, WITHOUT_R1, from_config, logits, make_source, make_token_ids, rotated
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rotexp.models.arch import embedding_name, find_spec, head_name, is_tied
from rotexp.models.load import build_model, open_checkpoint, open_structure
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place
from rotexp.rotation.survey import survey
from rotexp.rotation.trainable import train_also
from rotexp.training.options import Trainable

W4A4 = QuantConfig(weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False))
NO_R1 = {
    "none": RotationConfig("none", r1=False, r2=False, learned=False),
    "r1=false": RotationConfig(r1=False, r2=True, r4=True),
}
CASES = [
    *[(name, RotationConfig(r1=None, r2=True, r4=True)) for name in WITHOUT_R1],
    *[(name, rotation) for name in ("llama", "gemma", "gpt_neox", "opt", "cohere") for rotation in NO_R1.values()],
]


def storage_bytes(model: nn.Module) -> int:
    """Return the bytes of all storages that parameters lie in, each once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def make_tied(name: str) -> Any:
    source = make_source(name, tie_word_embeddings=True)
    assert is_tied(source)
    return source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied Llama's checkpoint."""
    make_tied("llama").save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def opened(path: Path) -> Any:
    return open_checkpoint(ModelConfig("hf", ModelSource.hf, str(path)), seed=0)


def loaded(path: Path, rotation: RotationConfig) -> Any:
    """Load, place and read a checkpoint as a run does."""
    checkpoint = opened(path)
    network: Any = build_model(checkpoint, dtype=torch.float32)
    model = place(network, find_spec(network), rotation, W4A4, seed=0)
    materialize(network, checkpoint, device=torch.device("cpu"), added=model.added)
    return model


@pytest.mark.parametrize(("name", "rotation"), CASES)
def test_without_r1_there_is_one_weight_and_merging_keeps_the_model(name: str, rotation: RotationConfig) -> None:
    source, token_ids = make_tied(name), make_token_ids()
    model = rotated(source, rotation, W4A4)
    assert model.untied is None
    assert storage_bytes(model.network) == storage_bytes(source) + storage_bytes(model.bank)
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= 1e-5
    merge(model)
    assert is_tied(model.network)
    assert storage_bytes(model.network) == storage_bytes(source)
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= 1e-5
    assert relative_error(source(token_ids).logits, logits(model, token_ids, quantize=True)) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox", "opt"])
def test_r1_parts_the_head_from_the_embedding_and_says_so(name: str) -> None:
    source, token_ids = make_tied(name), make_token_ids()
    model = rotated(source, RotationConfig(r1=True, r2=True))
    head = model.network.get_submodule(head_name(model.network)).get_parameter("weight")
    assert model.untied == f"{head_name(model.network)}.weight"
    assert not is_tied(model.network)
    assert model.network.config.tie_word_embeddings is False
    assert head.untyped_storage().data_ptr() != _embedding(model.network).untyped_storage().data_ptr()
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= 1e-5
    assert is_tied(source)


def _embedding(network: nn.Module) -> Tensor:
    return network.get_parameter(f"{embedding_name(network)}.weight")


@pytest.mark.parametrize("rotation", NO_R1.values(), ids=NO_R1)
def test_a_run_reads_a_tied_checkpoint_into_one_storage(folder: Path, rotation: RotationConfig) -> None:
    source: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = loaded(folder, rotation)
    assert storage_bytes(model.network) == storage_bytes(source) + storage_bytes(model.bank)
    assert torch.equal(_embedding(model.network), _embedding(source))
    assert model.network.state_dict().keys() >= source.state_dict().keys()


def test_with_r1_a_run_reads_embedding_and_head_from_the_one_tensor(folder: Path) -> None:
    model = loaded(folder, RotationConfig(r1=True, r2=True))
    head = model.network.lm_head.weight
    assert torch.equal(head, _embedding(model.network))
    head.zero_()
    assert _embedding(model.network).abs().max() > 0


@pytest.mark.parametrize("kind", ["safetensors", "torch.save"])
def test_a_checkpoint_that_stores_both_is_tied_if_they_are_equal_as_in_transformers(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr("rotexp.models.structure.COMPARED_ROWS", 7)
    tensors = load_file(folder / "model.safetensors")
    for change, tied in ((0.0, True), (1.0, False)):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += change
        if kind == "safetensors":
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            (folder / "model.safetensors").unlink(missing_ok=True)
            torch.save(tensors, folder / "pytorch_model.bin")
        reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = loaded(folder, NO_R1["none"])
        assert is_tied(model.network) is is_tied(reference) is tied
        assert torch.equal(model.network.lm_head.weight, reference.lm_head.weight)


def test_everything_trained_gives_the_tied_weight_the_sum_of_both_gradients() -> None:
    source, token_ids = make_tied("llama").double(), make_token_ids()
    model = rotated(source, NO_R1["none"], ready=False)
    train_also(model, Trainable.all)
    assert "lm_head.weight" not in model.trained_names
    prepare(model)
    with model.mode.set(rotate=True, quantize=False):
        model.logits(token_ids).square().mean().backward()
    oracle = copy.deepcopy(source)
    parts = {name: _embedding(oracle).detach().clone().requires_grad_() for name in ("embedding", "head")}
    hidden = oracle.model(inputs_embeds=nn.functional.embedding(token_ids, parts["embedding"])).last_hidden_state
    (hidden @ parts["head"].T).square().mean().backward()
    assert relative_error(parts["embedding"].grad + parts["head"].grad, _embedding(model.network).grad) <= 1e-10


def test_a_survey_counts_a_tied_head_once_with_and_without_r1(folder: Path) -> None:
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    checkpoint = open_structure(ModelConfig("hf", ModelSource.hf, str(folder)))
    for rotation in (NO_R1["none"], RotationConfig(r1=True, r2=True)):
        assert survey(checkpoint, rotation, QuantConfig(), seed=0).facts["parameters"] == count


def test_a_family_whose_language_model_alone_says_nothing_of_tying_is_tied_by_the_whole(tmp_path: Path) -> None:
    """Multimodal configs tie at their top; the language model's own config may say otherwise."""
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(**FAMILIES["llama"].options | {"tie_word_embeddings": False})
    whole = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_index=1)
    )
    whole.save_pretrained(tmp_path / "whole")
    model = loaded(tmp_path / "whole", NO_R1["none"])
    assert is_tied(model.network)
    assert model.network.config.tie_word_embeddings is True


def test_an_untied_model_stays_untied() -> None:
    source = from_config(FAMILIES["llama"].config(tie_word_embeddings=False))
    model = rotated(source, NO_R1["none"])
    assert (is_tied(model.network), model.untied) == (False, None)
    assert storage_bytes(model.network) == storage_bytes(source)
