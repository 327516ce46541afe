"""The shipped model and its builder: a plain Hugging Face folder, small, trained on calibration text only."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotexp.data.corpora import Corpus, builtin_corpus
from rotexp.models.tiny import FOLDER
from rotexp.models.tiny.build import (
    BLOCK_LENGTHS,
    Recipe,
    build,
    create_model,
    create_optimizer,
    draw_batches,
    encode,
    learning_rate_at,
    main,
    perplexity,
    train_tokenizer,
)

TEXT = 'def greet(name):\n\treturn f"Grüße, {name}!"\n\n\n  Two  spaces, 世界 🙂, \u00a0 and a trailing line\n'


def small_corpus() -> Corpus:
    """A small corpus with enough different words for a full vocabulary."""
    words = [f"{prefix}{index * 7919 % 4001:x}" for index in range(4000) for prefix in ("rot", "quant", "norm ")]
    return Corpus(calibration=" ".join(words), evaluation=" ".join(reversed(words[:800])))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "weights"
    build(small_corpus(), recipe=Recipe(num_steps=3, num_warmup_steps=1), output=folder)
    return folder


@pytest.mark.parametrize("folder", ["built", "shipped"])
def test_folder_loads_as_a_plain_checkpoint(folder: str, built: Path) -> None:
    path = built if folder == "built" else FOLDER
    model = AutoModelForCausalLM.from_pretrained(path)
    config = model.config
    assert config.model_type == "llama"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (192, 640, 8)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for size in (config.hidden_size, config.intermediate_size):
        assert size & (size - 1), "a power of two would leave the other Hadamard orders untried"


@pytest.mark.parametrize("folder", ["built", "shipped"])
def test_tokenizer_is_lossless_and_fits_the_model(folder: str, built: Path) -> None:
    path = built if folder == "built" else FOLDER
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer) == 2048
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == tokenizer.eos_token_id
    assert tokenizer("a<|endoftext|>")["input_ids"][-1] == tokenizer.eos_token_id


def test_evaluation_text_has_no_influence_on_the_model(built: Path, tmp_path: Path) -> None:
    corpus = replace(small_corpus(), evaluation="Something else entirely. " * 30)
    build(corpus, recipe=Recipe(num_steps=3, num_warmup_steps=1), output=tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (built / name).read_bytes()


def test_build_records_what_it_did(built: Path) -> None:
    facts = json.loads((built / "build.json").read_text())
    assert facts["recipe"]["num_steps"] == 3
    assert facts["recipe"]["seed"] == 0
    assert len(facts["calibration_digest"]) == len(facts["evaluation_digest"]) == 16
    assert facts["held_out_perplexity_bfloat16"] == pytest.approx(facts["held_out_perplexity_float32"], rel=0.02)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(built: Path, tmp_path: Path) -> None:
    build(small_corpus(), recipe=Recipe(num_steps=3, num_warmup_steps=1, seed=1), output=tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() != (built / "model.safetensors").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == (built / "tokenizer.json").read_bytes()


def test_perplexity_of_indifferent_logits_is_the_vocabulary_size() -> None:
    model = create_model(tokenizer=train_tokenizer("text"), init_std=0.02)
    torch.nn.init.zeros_(model.lm_head.weight)
    assert perplexity(model, tokens=torch.arange(600)) == pytest.approx(2048, rel=1e-4)


def test_batches_hold_the_same_number_of_tokens_and_come_from_the_text() -> None:
    recipe = Recipe(num_steps=len(BLOCK_LENGTHS), batch_tokens=1024)
    batches = list(draw_batches(torch.arange(5000), recipe=recipe))
    assert [batch.shape[1] for batch in batches] == list(BLOCK_LENGTHS)
    for batch in batches:
        assert batch.numel() == 1024
        assert torch.equal(batch.diff(dim=1), torch.ones_like(batch[:, 1:]))
    assert torch.equal(batches[0], next(draw_batches(torch.arange(5000), recipe=recipe)))
    assert not torch.equal(batches[0], next(draw_batches(torch.arange(5000), recipe=replace(recipe, seed=1))))


def test_learning_rate_warms_up_to_the_peak_and_decays_to_its_share() -> None:
    recipe = Recipe(num_steps=1000, num_warmup_steps=100, peak_learning_rate=0.01, final_learning_rate_share=0.1)
    rates = [learning_rate_at(step, recipe=recipe) for step in range(1000)]
    assert rates[0] == pytest.approx(0.0001)
    assert max(rates) == rates[99] == pytest.approx(0.01)
    assert rates[99:] == sorted(rates[99:], reverse=True)
    assert rates[-1] == pytest.approx(0.001, rel=0.01)


def test_weight_decay_spares_norm_gains_and_the_embedding() -> None:
    model = create_model(tokenizer=train_tokenizer("text"), init_std=0.02)
    decayed, spared = create_optimizer(model, recipe=Recipe(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) == 8 * 7
    assert {weight.shape for weight in spared["params"]} == {torch.Size([192]), torch.Size([2048, 192])}


def test_command_refuses_less_than_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "--steps 0: give at least 1" in capsys.readouterr().err


def test_shipped_folder_is_small_and_complete() -> None:
    names = {file.name for file in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "build.json"} <= names
    assert "README.md" not in names
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in FOLDER.iterdir()), "readable by every user"
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 10_000_000


def test_shipped_model_predicts_held_out_prose() -> None:
    recorded = json.loads((FOLDER / "build.json").read_text())["held_out_perplexity_bfloat16"]
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    # A twentieth of the text, which differs a little between Python versions: hence the width.
    tokens = encode(builtin_corpus().evaluation[:10_000], tokenizer=AutoTokenizer.from_pretrained(FOLDER))
    assert 0.5 * recorded < perplexity(model, tokens=tokens) < 2 * recorded
    assert recorded < 60
