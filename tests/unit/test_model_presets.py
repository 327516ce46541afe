"""Every model preset composes, validates, and says where the model comes from and what its shape is."""

import re
from functools import cache
from pathlib import Path

import hydra
import pytest
import rotexp.conf

from rotexp.config.composition import to_config
from rotexp.config.validation import validate
from rotexp.launch.command_line import register
from rotexp.models.options import ModelConfig, ModelDtype, ModelSource

FOLDER = Path(rotexp.conf.__path__[0]) / "model"
PRESETS = sorted(file.stem for file in FOLDER.glob("*.yaml"))
PROMISED = {
    "smollm2_135m smollm2_360m smollm2_1_7b",
    "llama3_2_1b llama3_2_3b llama3_1_8b llama3_1_70b",
    "qwen2_5_0_5b qwen2_5_1_5b qwen2_5_3b qwen2_5_7b qwen2_5_14b qwen2_5_32b qwen2_5_72b",
    "qwen3_0_6b qwen3_1_7b qwen3_4b qwen3_8b qwen3_14b qwen3_32b qwen3_30b_a3b",
    "mistral_7b mixtral_8x7b gemma2_2b gemma2_9b gemma2_27b gemma3_1b gemma3_4b gemma3_12b gemma3_27b",
    "phi3_mini phi3_medium phi4 phi4_mini opt_125m opt_1_3b opt_2_7b opt_6_7b opt_13b",
}
SMALL = {"smollm2_135m", "smollm2_360m", "qwen2_5_0_5b", "qwen3_0_6b", "opt_125m"}
"""Presets of less than a billion parameters, which are held in float32."""

FROM_HUB = sorted(" ".join(PROMISED).split())


@cache
def preset(name: str) -> ModelConfig:
    register()
    path = ["model.path=somewhere"] if name == "hf" else []
    with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
        config = to_config(hydra.compose("config", overrides=[f"model={name}", *path]))
    validate(config)
    return config.model


def test_the_promised_presets_are_those_that_name_a_hub_id() -> None:
    assert set(FROM_HUB) == set(PRESETS) - {"hf", "tiny", "random_llama", "smollm2_135m_gguf"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_composes_and_validates_under_its_own_name(name: str) -> None:
    assert preset(name).name == name


@pytest.mark.parametrize("name", FROM_HUB)
def test_a_pretrained_preset_names_a_hub_id_and_leaves_the_dtype_of_large_models(name: str) -> None:
    model = preset(name)
    assert model.source is ModelSource.hf
    assert re.fullmatch(r"[\w-]+/[\w.-]+", model.path or "")
    assert model.dtype is (ModelDtype.float32 if name in SMALL else ModelDtype.auto)


@pytest.mark.parametrize("name", FROM_HUB)
def test_a_pretrained_preset_says_license_and_shape_in_one_line(name: str) -> None:
    comment, *values = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"# .* from the hub \(.+\): hidden \d+, \d+ layers, \d+ heads.*\.", comment)
    assert 3 <= len(values) <= 4


def test_no_two_presets_name_the_same_model() -> None:
    assert len({preset(name).path for name in FROM_HUB}) == len(FROM_HUB)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.path=some/model"],
            "model.path=some/model: must be null for model=tiny; set model=hf model.path=some/",
        ),
        (["model=random_llama", "model.path=x"], "model.path=x: must be null for model=random_llama; set model=hf"),
        (
            ["model.revision=main"],
            "model.revision=main: must be null for model=tiny, which is not fetched from the hub;",
        ),
        (
            ["model=smollm2_135m_gguf", "model.revision=main"],
            "model.revision=main: must be null for model=smollm2_135m_",
        ),
    ],
)
def test_what_a_model_would_pass_over_is_refused(overrides: list[str], message: str) -> None:
    register()
    with hydra.initialize_config_module("rotexp.conf", version_base="1.3"):
        composed = hydra.compose("config", overrides=overrides)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        to_config(composed)
