"""What a rotation cannot pass is found by running a miniature of the model, before any weight is read."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, from_config, logits, make_source, make_token_ids, rotated
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from rotexp.models.arch import find_spec
from rotexp.models.structure import build_network
from rotexp.quant.options import QuantConfig
from rotexp.rotation import trial
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.miniature import INNER, first_layers
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import _place_untried, place

Change = Callable[[Tensor, Tensor], Tensor]
EACH = {"r1": "R1", "r2": "R2"}
OTHER = {"r1": "r2", "r2": "r1"}


def per_channel(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


def unchanged(x: Tensor, _other: Tensor) -> Tensor:
    return x


def altered(
    name: str, *, values: Change = unchanged, attended: Change = unchanged, stream: Change = unchanged, **members: Any
) -> Any:
    """Return the config's class of a model that nobody knows, Llama's but for functions without parameters.

    Args:
        values: of the values (batch, heads, tokens, head_dim) and the queries.
        attended: of what was attended (batch, tokens, heads, head_dim) and the queries in that layout.
        stream: of what a layer writes (batch, tokens, hidden) and what it was given.
        members: of the config's class.
    """

    class Attention(LlamaAttention):
        def forward(self, hidden_states: Tensor, **_options: Any) -> Any:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            query, key, value = (
                projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for projection in projections
            )
            value = self.config.change(values, value, query)
            heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            heads = self.config.change(attended, heads.transpose(1, 2), query.transpose(1, 2))
            return self.o_proj(heads.flatten(2)), None

    class Layer(LlamaDecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.self_attn = Attention(config, layer_idx)

        def forward(self, hidden_states: Tensor, **options: Any) -> Any:
            return self.config.change(stream, super().forward(hidden_states, **options), hidden_states)

    class Model(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
            for layer in self.model.layers:
                layer.config = config

    def change(self: Any, function: Change, x: Tensor, other: Tensor) -> Tensor:
        return function(x, other) if getattr(self, "limit", 1.0) else x

    kind = f"rotexp_trial_{name}".replace(" ", "_")
    config_class = type("Config", (LlamaConfig,), {"model_type": kind, "change": change, **members})
    Model.config_class = config_class
    AutoConfig.register(kind, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, Model, exist_ok=True)
    return config_class


OBSTACLES: dict[str, tuple[str, dict[str, Change]]] = {
    "a tanh of the values": ("r2", {"values": lambda v, _: torch.tanh(v)}),
    "a soft cap of the values": ("r2", {"values": lambda v, _: 50 * torch.tanh(v / 50)}),
    "a clip that acts rarely": ("r2", {"values": lambda v, _: v.clamp(-1e5, 1e5)}),
    "a relu": ("r2", {"values": lambda v, _: v.relu()}),
    "a scale of each channel of the values": ("r2", {"values": lambda v, _: v * per_channel(v)}),
    "a norm with a gain": ("r2", {"values": lambda v, _: F.rms_norm(v, v.shape[-1:]) * per_channel(v)}),
    "a gate of each channel": ("r2", {"attended": lambda heads, query: heads * torch.sigmoid(query)}),
    "a scale of each channel before the output": ("r2", {"attended": lambda heads, _: heads * per_channel(heads)}),
    "a clip of what is attended": ("r2", {"attended": lambda heads, _: heads.clamp(-300, 300)}),
    "a tanh of the stream": ("r1", {"stream": lambda x, _: 30 * torch.tanh(x / 30)}),
    "a clip of the stream that acts rarely": ("r1", {"stream": lambda x, _: x.clamp(-1e4, 1e4)}),
    "a scale of each channel of the stream": ("r1", {"stream": lambda x, _: x * per_channel(x)}),
    "a scale of what a layer adds": ("r1", {"stream": lambda x, given: given + (x - given) * per_channel(x)}),
    "positions that are added": ("r1", {"stream": lambda x, _: x + per_channel(x)}),
}
PASSED: dict[str, dict[str, Change]] = {
    "nothing": {},
    "a scale of each head": {"attended": lambda heads, _: heads * torch.linspace(1, 2, heads.shape[2])[:, None]},
    "a gate of each head": {"attended": lambda heads, query: heads * torch.sigmoid(query[..., :1])},
    "a norm without a gain": {"values": lambda v, _: F.rms_norm(v, v.shape[-1:])},
    "values twice": {"values": lambda v, _: 2 * v},
    "a multiplier of what a layer adds": {"stream": lambda x, given: given + 0.3 * (x - given)},
}


def only(key: str, value: bool | None) -> RotationConfig:
    rotations: dict[str, Any] = {"r1": False, "r2": False} | {key: value}
    return RotationConfig(**rotations)


def source_of(config_class: Any, **flags: Any) -> Any:
    return from_config(config_class(**FAMILIES["llama"].options | {"num_key_value_heads": 4} | flags))


def error_of(source: Any, model: Any) -> float:
    token_ids = make_token_ids()
    return relative_error(source(token_ids).logits, logits(model, token_ids))


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_function_that_a_rotation_cannot_pass_is_refused_or_left_out_by_its_place(name: str) -> None:
    key, changes = OBSTACLES[name]
    source = source_of(altered(name, **changes))
    kind = source.config.model_type
    place_ = rf"something in model\.layers\.0 \(Layer\) stands between .* so {EACH[key]} would change what it computes"
    with pytest.raises(ValueError, match=rf"rotation\.{key}=true: cannot act: model_type={kind}: {place_}") as refused:
        rotated(source, only(key, True))
    assert str(refused.value).endswith(f"; set rotation.{key}=false")
    model = rotated(source, RotationConfig(r4=None))
    assert [warning.startswith(f"{EACH[key]} is left out: model_type={kind}: ") for warning in model.warnings] == [True]
    assert {matrix[:2] for matrix, _ in model.bank.items()} == {EACH[OTHER[key]]}
    assert error_of(source, model) <= 1e-5


@pytest.mark.parametrize("name", PASSED)
def test_a_function_that_rotations_pass_is_no_obstacle(name: str) -> None:
    source = source_of(altered(f"with {name}", **PASSED[name]))
    model = rotated(source, RotationConfig(r1=True, r2=True, r4=True))
    assert model.warnings == []
    assert error_of(source, model) <= 1e-5


def test_the_flag_that_makes_the_difference_is_named() -> None:
    config_class = altered(
        "flag",
        values=lambda v, _: v.clamp(-3, 3),
        stream=lambda x, _: x.clamp(-9, 9),
        __annotations__={"limit": float | None, "other": int},
        limit=None,
        other=1,
    )
    for key in ("r1", "r2"):
        assert rotated(source_of(config_class), only(key, True)).warnings == []
        with pytest.raises(ValueError, match=r"model_type=rotexp_trial_flag: limit=2\.5 stands between"):
            rotated(source_of(config_class, limit=2.5, other=4), only(key, True))


@pytest.mark.parametrize("limit", [1e-2, 8.0, 5e4])
def test_olmos_clip_leaves_r2_out_whatever_it_is(limit: float) -> None:
    source = make_source("olmo", clip_qkv=limit)
    named = rf"model_type=olmo: clip_qkv={limit} stands between values and output"
    with pytest.raises(ValueError, match=rf"^rotation\.r2=true: cannot act: {named}, .*; set rotation\.r2=false$"):
        rotated(source, RotationConfig(r2=True))
    model = rotated(source, RotationConfig(r4=None))
    assert [name for name, _ in model.bank.items()] == ["R1"]
    assert error_of(source, model) <= 1e-5


def test_a_module_that_its_config_does_not_build_is_not_judged_by_a_miniature() -> None:
    class Other(LlamaAttention):
        pass

    source = make_source("llama")
    source.model.layers[1].self_attn.__class__ = Other
    model = rotated(source, only("r2", True))
    reason = "model.layers.1.self_attn is Other where its config builds LlamaAttention"
    assert model.warnings == [
        "whether R2 changes the model was not tried beforehand: model_type=llama: "
        f"no miniature of it could be run ({reason})"
    ]


def test_what_cannot_be_made_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotexp.rotation.miniature.MOST_PARAMETERS", 1000)
    trial._tried.cache_clear()
    model = rotated(make_source("llama"), only("r2", None))
    trial._tried.cache_clear()
    assert len(model.warnings) == 1
    assert "no miniature of it could be run (it still has " in model.warnings[0]


def test_a_miniature_has_every_kind_of_layer() -> None:
    mixed = ["full_attention"] * 3 + ["sliding_attention"] + ["full_attention"]
    models = {
        2: FAMILIES["llama"].config(num_hidden_layers=7),
        4: FAMILIES["ministral"].config(num_hidden_layers=5, layer_types=mixed),
        5: FAMILIES["qwen3_moe with a dense layer"].config(num_hidden_layers=6, mlp_only_layers=[4]),
    }
    for expected, config in models.items():
        model = build_network(config, dtype=torch.float32)
        assert first_layers(model, find_spec(model)) == expected


def test_a_trial_leaves_model_random_state_and_threads_alone() -> None:
    network = build_network(FAMILIES["gemma"].config(rms_norm_eps=3e-5), dtype=torch.float32)
    config, state, threads = copy.deepcopy(network.config.to_dict()), torch.get_rng_state(), torch.get_num_threads()
    finding = trial.Trial(network, find_spec(network), _place_untried).find("r1")
    assert finding == trial.Finding()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert network.config.to_dict() == config


def test_a_config_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    real = trial.build_miniature
    monkeypatch.setattr(trial, "build_miniature", lambda config, **named: built.append(0) or real(config, **named))
    for layers in (3, 3, 5):
        network = build_network(
            FAMILIES["llama"].config(num_hidden_layers=layers, rms_norm_eps=7e-5), dtype=torch.float32
        )
        place(network, find_spec(network), only("r2", True), QuantConfig(), seed=0)
    assert len(built) == 2


def clamp_values(layer: Any) -> None:
    layer.self_attn.v_proj.register_forward_hook(lambda _module, _inputs, output: output.clamp(-1, 1))


def double_inputs(layer: Any) -> None:
    layer.mlp.register_forward_pre_hook(lambda _module, inputs: (2 * inputs[0], *inputs[1:]))


def patch_output(layer: Any) -> None:
    linear = layer.self_attn.o_proj
    linear.forward = lambda x: F.linear(x.clamp(-1, 1), linear.weight)


BY_HAND: dict[str, tuple[Callable[[Any], None], str]] = {
    "a hook": (clamp_values, "self_attn.v_proj has a hook"),
    "a hook before": (double_inputs, "mlp has a hook"),
    "a forward": (patch_output, "self_attn.o_proj has a forward"),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_a_module_changed_by_hand_is_warned_of_by_name(kind: str) -> None:
    change, said = BY_HAND[kind]
    source = make_source("llama")
    change(source.model.layers[1])
    model = rotated(source, only("r2", True), ready=False)
    assert model.warnings == [
        "whether R2 changes the model was not tried beforehand: model_type=llama: "
        f"model.layers.1.{said} of its own, which was not judged"
    ]


def test_hooks_of_transformers_that_keep_outputs_are_nobodys_change() -> None:
    source = make_source("mixtral", output_router_logits=True)
    source(make_token_ids(), use_cache=False)
    assert any(module._forward_hooks for module in source.modules())
    assert rotated(source, only("r2", True)).warnings == []


def test_a_model_that_cannot_run_at_all_is_refused_in_one_line() -> None:
    source = make_source("llama", return_dict=False)
    said = r"rotated or not \(AttributeError: 'tuple' object has no attribute '\w+'\); correct its config, or choose "
    for wanted in (True, None):
        with pytest.raises(ValueError, match=rf"^model_type=llama: a miniature of it cannot be run, {said}"):
            rotated(source, only("r2", wanted))


def test_what_a_rotated_miniature_raises_is_told_in_its_own_words_and_at_no_place() -> None:
    def lost(_model: nn.Module, _spec: Any, _rotation: RotationConfig) -> Any:
        raise KeyError("lost " * 1000)

    network = build_network(FAMILIES["llama"].config(rms_norm_eps=2e-5), dtype=torch.float32)
    obstacle = trial.Trial(network, find_spec(network), lost).find("r2").obstacle
    assert obstacle is not None
    assert obstacle.startswith("model_type=llama: a miniature of it with R2 cannot be run (KeyError: 'lost lost ")
    assert len(obstacle) < 400


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2", "eager"])
def test_a_model_is_judged_whatever_computes_its_attention(implementation: str) -> None:
    network = build_network(FAMILIES["olmo"].config(clip_qkv=7.0), dtype=torch.float32)
    network.config._attn_implementation = implementation
    trial._tried.cache_clear()
    for key, found in (("r1", None), ("r2", "model_type=olmo: clip_qkv=7.0 stands between values and output")):
        finding = trial.Trial(network, find_spec(network), _place_untried).find(key)
        assert finding.untried is None
        assert (finding.obstacle or "").partition(",")[0] == (found or "")
    assert network.config._attn_implementation == implementation


def test_a_width_that_stays_as_it_is_has_the_blocks_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(INNER, "intermediate_size")
    trial._tried.cache_clear()
    source = make_source("llama", intermediate_size=30)
    model = rotated(source, RotationConfig(r1=False, r2=False, r4=True, block_size=2))
    trial._tried.cache_clear()
    assert model.warnings == []
    assert error_of(source, model) <= 1e-5


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", ["qwen2", "gemma", "olmo", "opt", "qwen3_moe with a dense layer"])
def test_defaults_of_the_caller_change_no_finding(name: str, default: str) -> None:
    source = make_source(name)
    trial._tried.cache_clear()
    with DEFAULTS[default]():
        model = rotated(source, RotationConfig(r1=True, r2=True, r3=True, r4=True))
    assert model.warnings == []
    token_ids = make_token_ids()
    assert relative_error(source(token_ids, use_cache=False).logits, logits(model, token_ids)) <= 1e-5


def test_trials_of_two_threads_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[int] = []
    together = threading.Event()

    def build(*_arguments: Any, **_named: Any) -> Any:
        within.append(0)
        if len(within) > 1:
            together.set()
        together.wait(0.3)
        within.pop()
        raise ValueError("none here")

    monkeypatch.setattr(trial, "build_miniature", build)
    network = build_network(FAMILIES["llama"].config(rms_norm_eps=6e-5), dtype=torch.float32)
    tried = trial.Trial(network, find_spec(network), _place_untried)
    threads = [threading.Thread(target=tried.find, args=(key,)) for key in ("r1", "r2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trial._tried.cache_clear()
    assert not together.is_set()


def test_nothing_is_tried_where_nothing_is_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rotexp.rotation.placement.Trial")
    rotated(make_source("llama"), RotationConfig(r1=False, r2=False, r3=False, r4=False))
    with pytest.raises(NameError):
        rotated(make_source("llama"), only("r2", True))
