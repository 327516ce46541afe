"""A norm's kind is found by running it, and folding it leaves the same model behind a neutral norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, WITH_R1, logits, make_source, make_token_ids, rotated, wanted
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from rotexp.models.arch import decoder_layers, embedding_name, present
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.norms import NormKind, fold_norms, norm_kinds, norm_readers, probe_norm
from rotexp.rotation.options import RotationConfig

WIDTH = 24


class Hiding(nn.Module):
    """A norm that says nothing of its eps."""

    def __init__(self, *, centred: bool, offset: float, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 - offset))
        self.hidden = (centred, offset, eps)

    def forward(self, x: Tensor) -> Tensor:
        centred, offset, eps = self.hidden
        if centred:
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + self.weight)


NORMS: dict[str, tuple[Callable[[], nn.Module], NormKind]] = {
    "llama": (lambda: LlamaRMSNorm(WIDTH, eps=1e-6), NormKind(False, 0.0, False, 1e-6)),
    "olmo2": (lambda: Olmo2RMSNorm(WIDTH, eps=1e-5), NormKind(False, 0.0, False, 1e-5)),
    "torch's RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-4), NormKind(False, 0.0, False, 1e-4)),
    "RMSNorm without gain": (
        lambda: nn.RMSNorm(WIDTH, eps=1e-4, elementwise_affine=False),
        NormKind(False, None, False, 1e-4),
    ),
    "gemma": (lambda: GemmaRMSNorm(WIDTH, eps=1e-6), NormKind(False, 1.0, False, 1e-6)),
    "gemma3": (lambda: Gemma3RMSNorm(WIDTH, eps=1e-6), NormKind(False, 1.0, False, 1e-6)),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), NormKind(True, 0.0, True, 1e-5)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(WIDTH, bias=False, eps=1e-3), NormKind(True, 0.0, False, 1e-3)),
    "LayerNorm without parameters": (
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        NormKind(True, None, False, 1e-5),
    ),
    "cohere": (lambda: CohereLayerNorm(WIDTH, eps=1e-5), NormKind(True, 0.0, False, 1e-5)),
    "nemotron": (lambda: NemotronLayerNorm1P(WIDTH, eps=1e-5), NormKind(True, 1.0, True, 1e-5)),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norms_kind_is_found_by_running_it(name: str, device: str) -> None:
    make, kind = NORMS[name]
    norm = make().to(device)
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    assert probe_norm(norm, WIDTH, name=name) == kind
    if device == "cpu":
        assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-8])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("centred", [False, True])
def test_an_eps_that_a_norm_hides_is_found(centred: bool, offset: float, eps: float) -> None:
    found = probe_norm(Hiding(centred=centred, offset=offset, eps=eps), WIDTH, name="norm")
    assert (found.centred, found.gain_offset, found.biased) == (centred, offset, False)
    assert found.eps == pytest.approx(eps, rel=1e-2)


def test_the_eps_of_a_norm_without_parameters_that_hides_it_is_found() -> None:
    found = probe_norm(OlmoLayerNorm(WIDTH), WIDTH, name="norm")
    assert (found.centred, found.gain_offset, found.biased) == (True, None, False)
    assert found.eps == pytest.approx(1e-5, rel=1e-2)


def test_an_eps_left_to_torch_is_found() -> None:
    found = probe_norm(nn.RMSNorm(WIDTH, eps=None), WIDTH, name="norm")
    assert found.eps == pytest.approx(torch.finfo(torch.float32).eps, rel=1e-2)


class Function(nn.Module):
    """Any function with a gain."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


NO_NORMS: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "a gain alone": lambda: Function(lambda x, gain: x * gain),
    "a norm of another order": lambda: Function(lambda x, gain: x / x.abs().mean(-1, keepdim=True) * gain),
    "another degree of freedom": lambda: Function(
        lambda x, gain: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * gain
    ),
    "a gain squared": lambda: Function(lambda x, gain: F.rms_norm(x, (WIDTH,)) * gain**2),
    "a gain of 2 + w": lambda: Function(lambda x, gain: F.rms_norm(x, (WIDTH,)) * (2 + gain)),
    "a dynamic tanh": lambda: Function(lambda x, gain: torch.tanh(x) * gain),
    "groups": lambda: nn.GroupNorm(2, WIDTH),
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_neither_is_refused_by_its_name(name: str) -> None:
    norm = NO_NORMS[name]()
    with pytest.raises(ValueError, match=rf"layers\.3\.norm: {type(norm).__name__} is neither RMSNorm nor LayerNorm"):
        probe_norm(norm, WIDTH, name="layers.3.norm")


@pytest.mark.parametrize("name", WITH_R1)
def test_folding_leaves_neutral_norms_and_the_same_model(name: str) -> None:
    source, token_ids = make_source(name), make_token_ids()
    model = rotated(source, wanted(name, "r1"), ready=False)
    groups = norm_readers(model.network, model.spec)
    kinds = norm_kinds(model.network, model.spec)
    assert len(groups) >= 3
    fold_norms(model.network, model.spec)
    for group in groups:
        for key, parameter in group.norm.named_parameters():
            neutral = 0.0 if key == "bias" else 1.0 - (kinds[group.name].gain_offset or 0.0)
            assert torch.equal(parameter, torch.full_like(parameter, neutral)), (group.name, key)
        x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(group.norm(x), F.rms_norm(x, (48,)), rtol=1e-3, atol=1e-4)
    error = relative_error(source(token_ids).logits, logits(model, token_ids, rotate=False))
    assert 0 < error <= 1e-5


@pytest.mark.parametrize("name", WITH_R1)
def test_writers_are_centred_exactly_where_norms_subtract_means(name: str) -> None:
    model = rotated(make_source(name), wanted(name, "r1"))
    written = [model.network.get_parameter(f"{embedding_name(model.network)}.weight").mean(-1)]
    for layer in decoder_layers(model.network, model.spec):
        for writer in present(layer, model.spec.writers):
            written += [parameter.mean(0) for parameter in layer.get_submodule(writer).parameters(recurse=False)]
    largest = max(float(mean.abs().max()) for mean in written)
    assert (largest < 1e-6) is (FAMILIES[name].norm == "layer")


def test_norms_of_two_kinds_are_refused_or_r1_left_out() -> None:
    source = make_source("llama")
    source.model.layers[1].input_layernorm = nn.LayerNorm(48, bias=False)
    with pytest.raises(ValueError, match=r"rotation\.r1=true: cannot act: model_type=llama: some of the norms"):
        rotated(source, RotationConfig(r1=True))
    model = rotated(source, RotationConfig())
    left_out, untried = model.warnings
    assert left_out == (
        "R1 is left out: model_type=llama: some of the norms subtract the mean and some do not, so R1 cannot pass them"
    )
    built = "model.layers.1.input_layernorm is LayerNorm where its config builds LlamaRMSNorm"
    assert untried.startswith("whether R2 changes the model was not tried beforehand: model_type=llama: ")
    assert untried.endswith(f"({built})")
    assert "R1" not in model.bank
    assert len(model.bank) == 2


def test_a_norm_that_cannot_be_folded_is_named_where_r1_is_refused_or_left_out() -> None:
    source = make_source("llama")
    odd = Function(lambda x, gain: torch.tanh(x) * gain)
    odd.weight = nn.Parameter(torch.ones(48), requires_grad=False)
    source.model.layers[1].post_attention_layernorm = odd
    named = r"model_type=llama: model\.layers\.1\.post_attention_layernorm: Function is neither"
    with pytest.raises(ValueError, match=rf"cannot act: {named}"):
        rotated(source, RotationConfig(r1=True))
    model = rotated(source, RotationConfig())
    assert [warning.split(": ")[1:3] for warning in model.warnings if "left out" in warning] == [
        ["model_type=llama", "model.layers.1.post_attention_layernorm"]
    ]
    with pytest.raises(ValueError, match=rf"^{named}"):
        fold_norms(model.network, model.spec)
    token_ids = make_token_ids()
    assert relative_error(source(token_ids).logits, logits(model, token_ids)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt_neox", "cohere", "gemma"])
def test_narrow_models_are_folded_in_float32_and_stay_narrow(name: str, dtype: torch.dtype) -> None:
    source, token_ids = make_source(name), make_token_ids()
    narrow = copy.deepcopy(source).to(dtype)
    model = rotated(narrow, wanted(name, "r1"))
    assert {p.dtype for path, p in model.network.named_parameters() if "rotation_bank" not in path} == {dtype}
    found: Any = logits(model, token_ids)
    assert found.dtype == dtype
    rounding = relative_error(source(token_ids).logits, narrow(token_ids).logits.float())
    assert relative_error(source(token_ids).logits, found.float()) < 4 * rounding


def test_a_folded_norm_of_a_narrow_model_computes_in_float32() -> None:
    model = rotated(make_source("gpt_neox", dtype=torch.float16), wanted("gpt_neox", "r1"))
    large = torch.full((1, 48), 300.0, dtype=torch.float16)  # whose squares float16 cannot hold
    norm = model.network.get_submodule("gpt_neox.final_layer_norm")
    assert torch.equal(norm(large), torch.ones_like(large))
