"""Names that a wrapper put something before are read through where one fits; else one short line says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_loading_files import CONFIGS, NESTED, assert_equals_transformers, opened, randomize, refusal
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

Rename = Callable[[str], str]
KINDS = ("llama", "llama tied", "mixtral", "opt")
PREFIXES: dict[str, Rename] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "lightning": lambda name: f"model.{name}",
    "a trainer's": lambda name: f"student.network.{name}",
    "compiled layers": lambda name: name.replace(".layers.0.", ".layers.0._orig_mod."),
    "FSDP1": lambda name: f"_fsdp_wrapped_module.{name}".replace(".layers.1.", ".layers.1._fsdp_wrapped_module."),
    "checkpointed": lambda name: name.replace(".layers.1.", ".layers.1._checkpoint_wrapped_module."),
}
MULTIMODAL: dict[str, Rename] = {
    "newer": lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name,
    "older": lambda name: f"language_model.{name}",
    "within": lambda name: f"thinker.model.{name.removeprefix('model.')}" if name.startswith("model.") else name,
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """A random model of each kind."""
    made = {kind: AutoModelForCausalLM.from_config(CONFIGS[kind]) for kind in KINDS}
    for model in made.values():
        randomize(model)
    return made


def write(folder: Path, model: Any, rename: Rename = str) -> dict[str, Tensor]:
    """Save a model with its tensors renamed; return them."""
    model.save_pretrained(folder)
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", PREFIXES)
def test_what_a_wrapper_puts_into_names_is_read_through(
    models: dict[str, Any], tmp_path: Path, kind: str, wrapper: str
) -> None:
    stored = write(tmp_path, models[kind], PREFIXES[wrapper])
    checkpoint = opened(tmp_path)
    assert checkpoint.weights.shapes().keys() == stored.keys()
    assert_equals_transformers(checkpoint, models[kind])


@pytest.mark.parametrize("kind", ["llama", "llama tied"])
@pytest.mark.parametrize("layout", MULTIMODAL)
def test_a_text_model_under_the_names_of_a_multimodal_one_is_read(
    models: dict[str, Any], tmp_path: Path, kind: str, layout: str
) -> None:
    write(tmp_path, models[kind], MULTIMODAL[layout])
    assert_equals_transformers(opened(tmp_path), models[kind])


def test_the_names_that_torch_itself_makes_are_read(models: dict[str, Any], tmp_path: Path) -> None:
    model = models["llama"]
    compiled: Any = torch.compile(model, backend="eager")
    write(tmp_path, model)
    for state in (compiled.state_dict(), nn.DataParallel(compiled).state_dict()):
        assert all("_orig_mod." in name for name in state)
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert_equals_transformers(opened(tmp_path), model)


@pytest.mark.parametrize("kind", NESTED)
def test_a_multimodal_checkpoint_is_read_through_a_wrapper(tmp_path: Path, kind: str) -> None:
    auto: Any = AutoModelForImageTextToText
    model = auto.from_config(NESTED[kind])
    randomize(model)
    write(tmp_path / "plain", model)
    write(tmp_path / "wrapped", model, lambda name: f"module._orig_mod.{name}")
    plain, wrapped = opened(tmp_path / "plain"), opened(tmp_path / "wrapped")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        assert torch.equal(plain.read(name), wrapped.read(name))


def test_a_tensor_that_a_wrapped_model_lacks_is_named(models: dict[str, Any], tmp_path: Path) -> None:
    tensors = write(tmp_path, models["llama"], lambda name: f"module.{name}")
    del tensors["module.model.norm.weight"]
    save_file(tensors | {"extra": torch.ones(2)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path).endswith("do not fit its config.json; missing: model.norm.weight; unexpected: extra")


def test_two_models_in_one_file_are_said(models: dict[str, Any], tmp_path: Path) -> None:
    tensors = write(tmp_path, models["llama"])
    both = {f"{who}.{name}": tensor.clone() for who in ("student", "teacher") for name, tensor in tensors.items()}
    save_file(both, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert message.endswith(": holds several models, whose names begin with student., teacher.; keep one of them")


def test_a_model_beside_its_average_is_not_chosen_from_in_silence(models: dict[str, Any], tmp_path: Path) -> None:
    tensors = write(tmp_path, models["llama"])
    save_file(tensors | {f"ema.{name}": tensor + 1 for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert "; unexpected: ema.lm_head.weight, " in message
    assert len(message) < 400


def test_a_parameter_that_is_there_with_and_without_its_wrapper_is_named(
    models: dict[str, Any], tmp_path: Path
) -> None:
    tensors = write(tmp_path, models["llama"])
    save_file(tensors | {"_orig_mod.lm_head.weight": tensors["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert all(
        name in message for name in ("lm_head.weight", "_orig_mod.lm_head.weight", "are one parameter; keep one")
    )


def test_names_of_another_architecture_are_said_in_a_short_line(models: dict[str, Any], tmp_path: Path) -> None:
    num_needed = len(write(tmp_path, models["llama"]))
    save_file({f"blocks.{index}.weight": torch.ones(2) for index in range(5000)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert f" and {num_needed - 3} more; unexpected: " in message
    assert message.endswith(" and 4997 more")
    assert len(message) < 400


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("model.layers.0.self_attn.q_proj.qweight", "its weights are stored quantized (such as "),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "its weights are stored quantized (such as "),
        (
            "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
            "its weights are stored quantized (such as ",
        ),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight", "holds an adapter that is not merged (such as "),
        ("model.layers.0.mlp.up_proj.base_layer.weight", "holds an adapter that is not merged (such as "),
    ],
)
def test_quantized_and_adapted_weights_are_known_by_their_names(
    models: dict[str, Any], tmp_path: Path, stored: str, said: str
) -> None:
    tensors = write(tmp_path, models["llama"])
    save_file(tensors | {stored: torch.ones(2)}, tmp_path / "model.safetensors")
    assert f"model.path={tmp_path}: {said}{stored}); " in refusal(tmp_path)
