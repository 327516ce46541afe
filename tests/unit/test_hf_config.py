"""Every config that transformers can make, and many it cannot, leads to a table or to one line that refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_gguf import write_gguf
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

from rotexp.models import hf_config
from rotexp.models.load import open_structure
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.survey import Survey, survey

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HUGE = ("llama4", "llama4_text")
"""Defaults that take minutes: torch makes and drops the memory of every expert."""


def inspected(folder: Path) -> Survey:
    """Do what `python -m rotexp.inspect` does."""
    checkpoint = open_structure(ModelConfig("hf", ModelSource.hf, str(folder)))
    return survey(checkpoint, RotationConfig(), QuantConfig(), seed=0)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"^model") as caught:
        inspected(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    return str(caught.value)


def write(folder: Path, **values: object) -> None:
    (folder / "config.json").write_text(json.dumps(LlamaConfig(**SHAPE).to_dict() | values), encoding="utf-8")


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_parameters": 3},
        {"layer_types": ["full_attention"]},
        {"num_attention_heads": 0},
        {"num_hidden_layers": "two"},
        {"vocab_size": None},
        {"dtype": "float99"},
        {"hidden_act": ["silu"]},
        {"max_position_embeddings": "many"},
        {"tie_word_embeddings": "no"},
        {"quantization_config": []},
        {"per_layer_config": []},
        {"to_dict": 3},
        {"get_text_config": 3},
        {"model_type": "llava", "text_config": {"model_type": "of_tomorrow"}},
    ],
    ids=str,
)
def test_values_that_no_config_has_are_refused_by_the_file(changed: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **changed)
    message = refusal(tmp_path)
    assert message.startswith(f"model.path={tmp_path}/config.json: transformers ")
    assert message.endswith("; correct it, or fetch the model again")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rope_parameters": {"rope_type": "of tomorrow"}}, "KeyError: 'of tomorrow'"),
        ({"hidden_act": "zz"}, "model_type=llama: transformers cannot build it from its config (KeyError: 'zz')"),
        ({"hidden_size": -48}, "hidden_size=-48 must be at least 1; correct its config"),
        ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be at least 1"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"pad_token_id": 99}, "AssertionError: Padding_idx must be within num_embeddings"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"head_dim": -3}, "negative dimension"),
        ({"attn_implementation": "of_tomorrow"}, "is not supported"),
        (
            {"per_layer_config": {"1": {"num_key_value_heads": 1}}},
            "its layers differ in num_key_value_heads, which is not",
        ),
        (
            {"model_type": "gemma4_text"},
            "model_type=gemma4_text: its layers differ in head_dim, which is not supported",
        ),
        ({"model_type": "gemma4_unified_text"}, "its layers differ in head_dim, which is not supported"),
        ({"text_config": []}, "model_type=[] (the language model of llama): transformers has no causal language model"),
        ({"model_type": "llava", "text_config": {"model_type": "bert"}}, "model_type=bert: this architecture is not"),
        ({"model_type": "reformer"}, "AssertionError: If you want to use `ReformerModelWithLMHead`"),
    ],
    ids=str,
)
def test_a_config_of_which_no_model_can_be_built_is_one_line(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write(tmp_path, **changed)
    message = refusal(tmp_path)
    assert message.startswith(f"model.path={tmp_path}/config.json: ")
    assert named in message


@pytest.mark.parametrize(
    "failure",
    [AssertionError(), IndexError("x\ny"), NotImplementedError("no"), StopIteration(), RecursionError("deep")],
)
def test_whatever_transformers_raises_is_one_line(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise failure

    write(tmp_path)
    for owner, name in ((AutoConfig, "from_pretrained"), (LlamaConfig, "get_text_config")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            assert type(failure).__name__ in refusal(tmp_path)


def test_the_file_that_is_named_is_the_one_that_holds_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GGUF file that file itself; where there is none, what the model is called."""
    file = tmp_path / "model.gguf"
    write_gguf(file, kv_heads=0)
    assert refusal(file).startswith(
        f"model.path={file}: model_type=qwen2: transformers cannot build it from its config"
    )
    monkeypatch.setattr(hf_config, "SIZES", ("no size",))
    monkeypatch.setattr(LlamaConfig, "to_dict", lambda self: {"no size": 0})
    random = ModelConfig("random_llama", ModelSource.random, size="nano")
    for model, name in ((random, "random_llama-nano"), (ModelConfig("tiny", ModelSource.tiny), "tiny")):
        with pytest.raises(ValueError, match=f"^model={name}: model_type=llama: no size=0 must be at least 1"):
            open_structure(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("initial", sorted({name[0] for name in CONFIG_MAPPING}))
def test_every_config_of_transformers_leads_to_a_table_or_one_line(initial: str, tmp_path: Path) -> None:
    outcomes = {}
    for model_type in (name for name in CONFIG_MAPPING if name[0] == initial and name not in HUGE):
        folder = tmp_path / model_type
        folder.mkdir()
        try:
            CONFIG_MAPPING[model_type]().save_pretrained(folder)
        except Exception:  # what has no defaults that can be stored is tried by its name alone
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        outcomes[model_type] = outcome(folder)
    assert [name for name, line in outcomes.items() if "\n" in line or not line.startswith(("table", "model"))] == []


def outcome(folder: Path) -> str:
    """Return `table`, the line that refuses it, or what escaped."""
    try:
        inspected(folder)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"escaped: {error!r}"
    return "table"
