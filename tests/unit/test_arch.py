"""Every parameter of a supported model is accounted for; unknown models are taken by their structure, or refused."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from families import FAMILIES, WITH_R1, from_config, logits, make_source, make_token_ids, rotated, wanted
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rotexp.models.arch import (
    COHERE,
    EXPERT_TYPES,
    GEMMA2,
    GLM4,
    GPT_NEOX,
    GPTJ,
    LLAMA,
    OLMO2,
    OPT,
    PHI,
    PHI3,
    STARCODER2,
    ArchSpec,
    ValueRows,
    check_coverage,
    check_structure,
    embedding_name,
    find_spec,
    head_dim,
    head_name,
    r1_obstacle,
    roles,
)
from rotexp.models.arch import FAMILIES as SPECS
from rotexp.models.hf_config import language_config
from rotexp.models.structure import build_network
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge
from rotexp.rotation.options import RotationConfig

ON_META = {name: family.config() for name, family in FAMILIES.items()}


def build(config: Any) -> Any:
    """Build a causal model without memory, as a run does before it has weights."""
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_its_model_type(name: str) -> None:
    model = build(ON_META[name])
    spec = find_spec(model)
    assert model.config.model_type in spec.model_types
    assert spec in SPECS


def test_every_model_type_belongs_to_one_family_and_is_tested() -> None:
    types = Counter(model_type for spec in SPECS for model_type in spec.model_types)
    assert set(types.values()) == {1}
    tested = {config.model_type for config in ON_META.values()}
    assert tested == types.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_a_role(name: str) -> None:
    model = build(ON_META[name])
    spec = find_spec(model)
    assert check_coverage(model, spec) == []
    found = roles(model, spec)
    assert found.keys() == dict(model.named_parameters()).keys()
    kinds = ("reads", "writes", "norm: ", "deliberately not rotated: ")
    assert all(role.startswith(kinds) for role in found.values())
    assert found[f"{embedding_name(model)}.weight"] == "writes: embedding"


@pytest.mark.parametrize("name", WITH_R1)
def test_what_has_a_role_in_the_residual_stream_is_rotated_and_nothing_else(name: str) -> None:
    source = make_source(name)
    model = rotated(source, wanted(name, "r1"))
    before = {path: parameter.clone() for path, parameter in model.network.named_parameters()}
    found = roles(model.network, model.spec)
    merge(model)
    for path, parameter in model.network.named_parameters():
        changed = not torch.equal(parameter, before[path])
        weight = not path.endswith("bias")
        rotates = found[path].startswith("writes") or (found[path].startswith("reads") and weight)
        assert changed is rotates, (path, found[path])


@pytest.mark.parametrize("name", ["llama", "gemma", "mixtral", "opt", "gpt_neox"])
def test_a_parameter_without_a_role_stops_and_is_named(name: str) -> None:
    model = build(ON_META[name])
    spec = find_spec(model)
    layer = model.get_submodule(spec.layers)[1]
    layer.memory = nn.Parameter(torch.zeros(3, 48))
    assert [spec.layers in gap and "1.memory (3, 48)" in gap for gap in check_coverage(model, spec)] == [True]
    with pytest.raises(ValueError, match=rf"nothing says whether {spec.layers}\.1\.memory \(3, 48\) touches"):
        find_spec(model)


def test_a_parameter_without_a_role_outside_the_layers_is_named() -> None:
    model = build(ON_META["llama"])
    model.model.projector = nn.Linear(48, 48)
    with pytest.raises(ValueError, match=r"model\.projector\.weight \(48, 48\)"):
        find_spec(model)


def unknown(base: str, model: str, *, name: str, extra: bool = False, **members: Any) -> type[Any]:
    """Register a model type nobody knows, with the structure of a known one; return its config's class.

    Args:
        base, model: names in transformers of the config's and the causal model's class.
        extra: whether every layer has one parameter more.
        members: of the config's class.
    """
    known_config, known_model = getattr(transformers, base), getattr(transformers, model)
    config_class = type("UnknownConfig", (known_config,), {"model_type": name, **members})

    def initialize(self: Any, config: Any) -> None:
        known_model.__init__(self, config)
        if extra:
            for layer in self.get_submodule(find_layers(self)):
                layer.register_parameter("memory", nn.Parameter(torch.zeros(7)))

    model_class = type("UnknownForCausalLM", (known_model,), {"config_class": config_class, "__init__": initialize})
    AutoConfig.register(name, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    return config_class


def find_layers(model: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


STRUCTURES: dict[str, tuple[str, ArchSpec]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "gemma": ("GemmaForCausalLM", LLAMA),
    "stablelm": ("StableLmForCausalLM", LLAMA),
    "nemotron": ("NemotronForCausalLM", LLAMA),
    "phi3": ("Phi3ForCausalLM", PHI3),
    "glm4": ("Glm4ForCausalLM", GLM4),
    "gemma2 with binding caps": ("Gemma2ForCausalLM", GEMMA2),
    "olmo2": ("Olmo2ForCausalLM", OLMO2),
    "cohere": ("CohereForCausalLM", COHERE),
    "phi": ("PhiForCausalLM", PHI),
    "starcoder2": ("Starcoder2ForCausalLM", STARCODER2),
    "opt": ("OPTForCausalLM", OPT),
    "gpt_neox": ("GPTNeoXForCausalLM", GPT_NEOX),
    "gptj": ("GPTJForCausalLM", GPTJ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_unknown_model_is_taken_by_its_structure_and_stays_what_it_is(name: str) -> None:
    model_class, spec = STRUCTURES[name]
    config_class = unknown(FAMILIES[name].config_class, model_class, name=f"rotexp_like_{spec.model_types[0]}")
    source = from_config(config_class(**FAMILIES[name].options))
    assert source.config.model_type == f"rotexp_like_{spec.model_types[0]}"
    assert find_spec(source) == spec
    token_ids = make_token_ids()
    model = rotated(source, wanted(name, "all"))
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= 1e-5


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_unknown_model_with_one_parameter_more_is_refused_by_its_name(name: str) -> None:
    model_class, spec = STRUCTURES[name]
    model_type = f"rotexp_extended_{spec.model_types[0]}"
    config_class = unknown(FAMILIES[name].config_class, model_class, name=model_type, extra=True)
    model = build(config_class(**FAMILIES[name].options))
    with pytest.raises(ValueError, match=rf"model_type={model_type}: nothing says whether {spec.layers}\.0\.memory"):
        find_spec(model)


def test_experts_of_an_unknown_model_are_refused_since_nobody_knows_what_they_compute() -> None:
    config_class = unknown("MixtralConfig", "MixtralForCausalLM", name="rotexp_like_mixtral")
    model = build(config_class(**FAMILIES["mixtral"].options))
    with pytest.raises(ValueError, match="model_type=rotexp_like_mixtral: these experts are not supported; supported"):
        find_spec(model)
    assert set(EXPERT_TYPES) <= set(LLAMA.model_types)


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        ("GPT2Config", {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
        ("BloomConfig", {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
        ("MambaConfig", {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 61, "state_size": 4}),
    ],
)
def test_a_structure_that_no_family_has_is_refused_with_those_that_are_supported(
    config_class: str, options: dict[str, Any]
) -> None:
    config = getattr(transformers, config_class)(**options)
    with pytest.raises(ValueError, match=rf"model_type={config.model_type}: .*not supported.*cohere, .*starcoder2"):
        find_spec(build(config))


def test_a_linear_of_an_unknown_class_is_not_replaced() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    source = make_source("llama")
    source.model.layers[1].mlp.up_proj = Scaled(48, 56, bias=False)
    with pytest.raises(ValueError, match="a Scaled stands where a Linear is needed"):
        rotated(source, RotationConfig())


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [
        ("llama", None),
        ("opt", None),
        ("gemma2 with binding caps", "post_attention_layernorm and post_feedforward_layernorm have a gain"),
        ("glm4", "post_self_attn_layernorm and post_mlp_layernorm have a gain"),
        ("olmo2", "post_attention_layernorm and post_feedforward_layernorm have a gain"),
        ("opt with norms behind", "do_layer_norm_before=False: its norms stand behind the residual additions"),
        (
            "opt with narrow embeddings",
            "its embeddings (model.decoder.embed_tokens) are 16 wide, its residual stream 48",
        ),
    ],
)
def test_the_spec_says_why_no_rotation_acts_on_a_residual_stream(name: str, obstacle: str | None) -> None:
    model = build(ON_META[name])
    found = r1_obstacle(model, find_spec(model))
    assert (found is None) is (obstacle is None)
    assert found is None or found.startswith(f"model_type={model.config.model_type}: {obstacle}")


def test_a_head_that_reads_the_stream_without_a_norm_is_an_obstacle() -> None:
    model = build(ON_META["opt"])
    model.model.decoder.final_layer_norm = None
    found = r1_obstacle(model, OPT)
    without = "model.decoder.final_layer_norm is missing: its head reads the residual stream without one"
    assert found == f"model_type=opt: {without}"


def test_embedding_and_head_are_found_whatever_they_are_called() -> None:
    names = {name: build(ON_META[name]) for name in ("llama", "opt", "gpt_neox", "gptj")}
    assert {name: embedding_name(model) for name, model in names.items()} == {
        "llama": "model.embed_tokens",
        "opt": "model.decoder.embed_tokens",
        "gpt_neox": "gpt_neox.embed_in",
        "gptj": "transformer.wte",
    }
    for model in names.values():
        assert model.get_submodule(head_name(model)) is model.get_output_embeddings()


def test_values_lie_behind_queries_and_keys_or_behind_those_of_their_head() -> None:
    fused, interleaved = ON_META["phi3"], ON_META["gpt_neox"]
    assert PHI3.value_rows(fused) == ValueRows(1, 48 + 24, 48 + 24 + 24)
    assert GPT_NEOX.value_rows(interleaved) == ValueRows(4, 24, 36)
    assert LLAMA.value_rows(ON_META["llama"]) is None


def test_the_width_of_a_head_is_explicit_or_a_share_of_the_stream() -> None:
    assert head_dim(ON_META["qwen3 with wide heads"]) == 20
    assert head_dim(ON_META["opt"]) == head_dim(ON_META["gptj"]) == 12


def test_a_flag_can_give_a_family_the_structure_of_another() -> None:
    sequential, parallel = (
        build(FAMILIES["stablelm"].config(use_parallel_residual=parallel)) for parallel in (False, True)
    )
    assert find_spec(sequential) is LLAMA
    assert find_spec(parallel) is COHERE


def without(model: Any, name: str) -> Any:
    """Return the model with a module of its second layer gone."""
    parent, _, child = f"1.{name}".rpartition(".")
    setattr(model.model.layers.get_submodule(parent), child, None)
    return model


@pytest.mark.parametrize(
    ("name", "missing", "complaint"),
    [
        (
            "llama",
            "post_attention_layernorm",
            "post_attention_layernorm is missing before mlp.gate_proj, mlp.up_proj",
        ),
        ("llama", "mlp", "mlp.down_proj or mlp.shared_expert.down_proj or mlp.experts is missing"),
        ("llama", "self_attn.o_proj", "self_attn.o_proj is missing"),
        ("qwen2", "self_attn.v_proj", "self_attn.v_proj is missing"),
        ("gemma2 with binding caps", "post_feedforward_layernorm", "post_feedforward_layernorm is missing"),
    ],
)
def test_a_layer_without_what_its_structure_needs_is_refused_by_the_name_of_that(
    name: str, missing: str, complaint: str
) -> None:
    model = without(build(ON_META[name]), missing)
    kind, structure = model.config.model_type, find_spec(build(ON_META[name])).model_types[0]
    expected = f"model_type={kind}: model.layers.1.{complaint}, so it has not the structure of {structure}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        find_spec(model)


def test_a_norm_that_nothing_reads_is_refused_by_its_name() -> None:
    model = build(ON_META["cohere"])
    spec = replace(COHERE, norms={**COHERE.norms, "post_attention_layernorm": ("mlp.fc1",)})
    assert check_structure(model, spec) == []
    model.model.layers[1].post_attention_layernorm = nn.Identity()
    complaint = "model.layers.1.post_attention_layernorm is read by none of mlp.fc1"
    assert check_structure(model, spec) == [f"{complaint}, so it has not the structure of cohere"]


def test_heads_of_several_widths_are_refused() -> None:
    model = build(ON_META["opt"])
    model.config.head_dim = [12, 16]
    with pytest.raises(ValueError, match=r"^model_type=opt: head_dim=\[12, 16\]: such models are not supported"):
        find_spec(model)


def test_layers_of_several_widths_are_refused_from_python_as_from_a_folder() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "vocab_size": 99}
    config = AutoConfig.for_model("gemma4_text", vocab_size_per_layer_input=99, **sizes)
    with pytest.raises(ValueError, match="model_type=gemma4_text: its layers differ in head_dim") as refused:
        find_spec(build_network(config, dtype=torch.float32))
    with pytest.raises(ValueError, match="model_type=gemma4_text: its layers differ in head_dim") as of_config:
        language_config(config)
    assert str(refused.value) == str(of_config.value)
