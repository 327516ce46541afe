"""What is trained beside rotations gets its gradients, is named, merges, is read back; and nothing else moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    WITH_LAYER_NORM,
    WITH_R1,
    WITHOUT_R1,
    logits,
    make_source,
    make_token_ids,
    rotated,
    wanted,
)
from safetensors.torch import save_file
from torch import Tensor, nn

from rotexp.config.schema import Config
from rotexp.experiment.finished_model import build_finished, merge_finished
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.file import save_rotations
from rotexp.rotation.invariance import check_merged, relative_error, trace
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.trainable import load_trained, start_scales, train_also
from rotexp.runfolder.finished_run import FinishedRun
from rotexp.training.optimizers import Optimizers
from rotexp.training.options import Trainable, TrainConfig

W4 = QuantConfig(weights=QuantSpec(4, clip_search=True))
W4A8 = QuantConfig(weights=QuantSpec(4, clip_search=True), activations=QuantSpec(8, symmetric=False))
GROUPED = QuantConfig(weights=QuantSpec(4, group_size=4, clip_search=True))
MOE = ["mixtral", "qwen2_moe", "qwen3_moe with a dense layer"]
SEVERAL = ["llama with biases", "qwen3 with wide heads", "gemma", "mixtral", "cohere", "gpt_neox", "opt", "phi"]
OTHERS = [params for params in Trainable if params is not Trainable.rotations]


def make(name: str, params: Trainable, quant: QuantConfig = W4A8, *, placement: str = "all") -> RotatedModel:
    """Return a prepared model of a family that trains `params`."""
    model = rotated(make_source(name), wanted(name, placement), quant, ready=False)
    train_also(model, params)
    prepare(model)
    return model


def backward(model: RotatedModel, *, quantize: bool = True) -> Tensor:
    """Differentiate a loss of the rotated model; returns its logits."""
    with model.mode.set(rotate=True, quantize=quantize):
        found = model.logits(make_token_ids())
    found.square().mean().backward()
    return found.detach()


def gradients(model: RotatedModel) -> dict[str, Tensor]:
    named = model.network.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@torch.no_grad()
def move(model: RotatedModel) -> None:
    """Change everything that is trained, as training would, but more."""
    generator = torch.Generator().manual_seed(11)
    for name in model.trained_names:
        parameter = model.network.get_parameter(name)
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("name", SEVERAL)
def test_with_rotations_alone_nothing_is_another(name: str) -> None:
    with_call, without = make(name, Trainable.rotations), rotated(make_source(name), wanted(name, "all"), W4A8)
    assert with_call.trained_names == []
    assert with_call.unsharded == set(with_call.bank.parameters())
    assert torch.equal(backward(with_call), backward(without))
    found, expected = gradients(with_call), gradients(without)
    assert found.keys() == expected.keys() == {f"rotation_bank.{own}" for own, _ in with_call.bank.items()}
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("params", OTHERS)
@pytest.mark.parametrize("name", SEVERAL)
def test_until_something_moved_outputs_and_the_rotations_gradients_are_those_of_rotations_alone(
    name: str, params: Trainable
) -> None:
    model, alone = make(name, params), make(name, Trainable.rotations)
    start_scales(model)
    assert torch.equal(backward(model), backward(alone))
    for key, gradient in gradients(alone).items():
        assert torch.equal(gradients(model)[key], gradient), key


@pytest.mark.parametrize("name", WITH_R1 + WITHOUT_R1)
def test_all_gives_every_parameter_a_gradient_and_names_it_in_order(name: str) -> None:
    model = make(name, Trainable.all)
    own = [key for key, _ in model.network.named_parameters() if not key.startswith("rotation_bank.")]
    assert model.trained_names == own
    assert model.unsharded == set(model.bank.parameters())
    backward(model)
    found = gradients(model)
    assert found.keys() == {key for key, _ in model.network.named_parameters()}
    for key in own:
        assert found[key].abs().max() > 0 or key.endswith("k_proj.bias"), key  # softmax ignores what all keys share


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("name", ["llama with biases", "mixtral", "gemma"])
def test_weights_get_the_gradients_of_the_dense_composition(name: str, quantize: bool) -> None:
    """Autograd through explicit products, with the quantizers whose straight-through gradients are tested elsewhere."""
    model = make(name, Trainable.all, QuantConfig(weights=QuantSpec(8)))
    backward(model, quantize=quantize)
    found = gradients(model)
    for module in model.rotated_modules:
        if isinstance(module, RotatedLinear):
            module.forward = dense_forward(module)  # type: ignore[method-assign]
    model.network.zero_grad()
    backward(model, quantize=quantize)
    expected = gradients(model)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert (found[key] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, key


def dense_forward(module: RotatedLinear) -> Any:
    """Rotate the weight by written-out matrices, quantize it, multiply."""

    def block(matrix: Tensor, size: int) -> Tensor:
        return torch.block_diag(*[matrix] * (size // len(matrix)))

    def forward(x: Tensor) -> Tensor:
        x = x if module.online is None else module.online(x)
        weight, bias = module.weight, module.bias
        if module.input_rotation is not None:
            weight = weight @ block(module.input_rotation.matrix, weight.shape[1])
        if module.output_rotation is not None:
            after = block(module.output_rotation.matrix, weight.shape[0])
            weight, bias = after.T @ weight, None if bias is None else bias @ after
        if module.mode.quantize:
            weight = module.weight_quantizer(weight)
        return nn.functional.linear(x, weight, bias)

    return forward


@pytest.mark.parametrize("placement", ["all", "r2"])
@pytest.mark.parametrize("name", SEVERAL + WITHOUT_R1[:2])
def test_norms_are_trained_and_nothing_but_them(name: str, placement: str) -> None:
    model = make(name, Trainable.rotations_and_norms, placement=placement)
    assert model.trained_names
    assert all(any(part in key for part in ("norm", "ln_")) for key in model.trained_names)
    others = [key for key, _ in model.network.named_parameters() if key not in model.trained_names]
    assert not any(any(part in key for part in ("norm", "ln_")) for key in others)
    backward(model)
    assert gradients(model).keys() >= set(model.trained_names)
    assert all(gradients(model)[key].abs().max() > 0 for key in model.trained_names)


@pytest.mark.parametrize("name", WITH_LAYER_NORM)
def test_a_norm_that_became_another_follows_its_gain_and_bias(name: str) -> None:
    model = make(name, Trainable.rotations_and_norms, QuantConfig())
    before = logits(model, make_token_ids())
    for key in model.trained_names:
        parameter = model.network.get_parameter(key)
        with torch.no_grad():
            parameter.add_(1.0)
        assert relative_error(before, logits(model, make_token_ids())) > 1e-4, key
        with torch.no_grad():
            parameter.sub_(1.0)


def test_a_trained_gain_and_bias_act_between_the_norm_and_its_readers() -> None:
    model = make("gpt_neox", Trainable.rotations_and_norms, QuantConfig())
    norm = model.network.get_submodule("gpt_neox.layers.1.input_layernorm")
    gain, bias = (torch.randn(48, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with torch.no_grad():
        norm.weight.copy_(gain)
        norm.bias.copy_(bias)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(3))
    root = (x.square().mean(-1, keepdim=True) + model.network.config.layer_norm_eps).sqrt()
    torch.testing.assert_close(norm(x), x / root * gain + bias)


@pytest.mark.parametrize("params", OTHERS)
@pytest.mark.parametrize("name", SEVERAL)
def test_what_was_trained_is_merged_with_the_rotations(name: str, params: Trainable) -> None:
    model, token_ids = make(name, params, W4), make_token_ids()
    untrained = logits(model, token_ids, quantize=True)
    start_scales(model)
    move(model)
    before = trace(model, token_ids, rotate=True)
    quantized = logits(model, token_ids, quantize=True)
    assert relative_error(untrained, quantized) > 1e-2
    merge(model)
    assert check_merged(before, model, dtype=torch.float32) <= 1e-5
    model.refresh_quantizers()
    if params is Trainable.rotations_and_scales:
        assert relative_error(quantized, logits(model, token_ids, quantize=True)) <= 1e-5


@pytest.mark.parametrize("params", [Trainable.rotations_and_norms, Trainable.all])
def test_merged_trained_weights_run_in_a_plain_model(params: Trainable) -> None:
    source, token_ids = make_source("llama with biases"), make_token_ids()
    model = rotated(source, RotationConfig(), QuantConfig(), ready=False)
    train_also(model, params)
    prepare(model)
    move(model)
    trained = logits(model, token_ids)
    merge(model)
    plain = make_source("llama with biases", seed=3)
    plain.load_state_dict(model.network.state_dict())
    assert relative_error(trained, plain(token_ids).logits) <= 1e-5
    assert relative_error(source(token_ids).logits, trained) > 1e-2


@pytest.mark.parametrize("quant", [W4A8, GROUPED], ids=["rows", "groups"])
@pytest.mark.parametrize("name", ["llama with biases", *MOE])
def test_scales_are_one_ratio_for_each_group_of_each_quantized_weight(name: str, quant: QuantConfig) -> None:
    model = make(name, Trainable.rotations_and_scales, quant)
    assert model.scales is not None
    expected: dict[str, tuple[int, ...]] = {}
    for key, module in model.network.named_modules():
        names = ("gate_up_proj", "down_proj") if isinstance(module, RotatedExperts) else ("weight",)
        quantized = isinstance(module, (RotatedLinear, RotatedExperts)) and module.quantized_widths()[0][1].enabled
        for own in names if quantized else ():
            *outputs, width = module.get_parameter(own).shape
            scale = f"quantizer_scales.{key.replace('.', '-')}-{own}"
            expected[scale] = (*outputs, width // 4 if quant is GROUPED else 1)
    assert {key: tuple(model.network.get_parameter(key).shape) for key in model.trained_names} == expected
    assert {*model.scales.parameters(), *model.bank.parameters()} == model.unsharded


@pytest.mark.parametrize("name", ["llama with biases", *MOE])
def test_scales_start_as_the_searched_ratios_of_the_rotated_weights(name: str) -> None:
    model = make(name, Trainable.rotations_and_scales, GROUPED)
    before = logits(model, make_token_ids(), quantize=True)
    model.refresh_quantizers()
    start_scales(model)
    assert torch.equal(logits(model, make_token_ids(), quantize=True), before)
    for module in model.rotated_modules:
        for own, quantizer in module.weight_quantizers.items():
            if quantizer.spec.enabled:
                ratios = quantizer.search(module.merged()[own])
                assert quantizer.ratios is not None
                assert torch.equal(quantizer.ratios, ratios)


@pytest.mark.parametrize("name", ["llama with biases", *MOE])
def test_learning_scales_brings_the_quantized_model_closer_to_the_float_one(name: str) -> None:
    """At the default rate, schedule and number of steps, at 4 bits from searched ratios."""
    model = make(name, Trainable.rotations_and_scales, W4)
    start_scales(model)
    assert model.scales is not None
    config = Config(train=TrainConfig(params=Trainable.rotations_and_scales))
    token_ids, optimizers = make_token_ids(), Optimizers({}, dict(model.scales.named_parameters()), config)
    target, errors = logits(model, token_ids), []
    for _ in range(config.train.steps):
        with model.mode.set(rotate=True, quantize=True):
            error = (model.logits(token_ids) - target).square().mean()
        optimizers.zero_grad()
        error.backward()
        assert all(ratios.grad.abs().max() > 0 for ratios in model.scales.parameters())
        optimizers.step()
        optimizers.schedule()
        errors.append(error.item())
    assert errors[-1] < 0.8 * errors[0]


def test_a_searched_row_stays_what_it_was_until_scales_are_started() -> None:
    token_ids = make_token_ids()
    model, alone = make("mixtral", Trainable.rotations_and_scales), make("mixtral", Trainable.rotations)
    for rotate in (False, True):
        expected = logits(alone, token_ids, rotate=rotate, quantize=True)
        assert torch.equal(logits(model, token_ids, rotate=rotate, quantize=True), expected)
        model.refresh_quantizers()
        alone.refresh_quantizers()


def test_once_merged_the_network_registers_no_scales_and_keeps_them() -> None:
    source = make_source("llama")
    model = make("llama", Trainable.rotations_and_scales, W4)
    start_scales(model)
    move(model)
    ratios = [quantizer.ratios for module in model.rotated_modules for quantizer in module.weight_quantizers.values()]
    merge(model)
    kept = [quantizer.ratios for module in model.rotated_modules for quantizer in module.weight_quantizers.values()]
    assert model.network.state_dict().keys() == source.state_dict().keys()
    assert model.trained_names == []
    for before, after in zip(ratios, kept, strict=True):
        assert before is after is None or torch.equal(before, after)


def test_scales_of_whole_weights_are_refused() -> None:
    model = rotated(make_source("llama"), quant=QuantConfig(activations=QuantSpec(8)), ready=False)
    with pytest.raises(ValueError, match=r"train\.params=rotations_and_scales: quant\.weights\.bits=16 .*choose"):
        train_also(model, Trainable.rotations_and_scales)


def saved(model: RotatedModel, file: Path, **changes: Tensor | None) -> Path:
    """Write what a model trained, as the end of a run does, some tensors changed or left out."""
    tensors = {name: model.network.get_parameter(name).detach().clone() for name in model.trained_names} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return file


@pytest.mark.parametrize("params", OTHERS)
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox"])
def test_what_was_trained_is_read_back(tmp_path: Path, name: str, params: Trainable) -> None:
    model, other = make(name, params), make(name, params)
    start_scales(model)
    move(model)
    load_trained(other, saved(model, tmp_path / "weights.safetensors"))
    for quantize in (False, True):
        expected = logits(model, make_token_ids(), quantize=quantize)
        assert torch.equal(logits(other, make_token_ids(), quantize=quantize), expected)


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox"])
@pytest.mark.parametrize("params", OTHERS)
def test_in_bfloat16_gradients_are_those_of_float32_rounded(name: str, params: Trainable) -> None:
    quant, found = W4 if params is Trainable.rotations_and_scales else QuantConfig(), []
    for dtype in (torch.bfloat16, torch.float32):
        source = make_source(name, dtype=torch.bfloat16).to(dtype)
        model = rotated(source, wanted(name, "r1"), quant, ready=False)
        train_also(model, params)
        prepare(model)
        start_scales(model)
        backward(model)
        for key, gradient in gradients(model).items():
            whole = key.startswith(("rotation_bank", "quantizer_scales"))
            assert gradient.dtype == (torch.float32 if whole else dtype)
        found.append(torch.cat([gradients(model)[key].float().flatten() for key in model.trained_names]))
    assert torch.cosine_similarity(*found, dim=0) > (0.9 if params is Trainable.rotations_and_scales else 0.99)


NAME = "llama with biases"


def finished(folder: Path, params: Trainable, *, steps: int = 2) -> FinishedRun:
    """Write a small Llama and what a run on it leaves, except the trained weights."""
    make_source(NAME).save_pretrained(folder / "source")
    source = ModelConfig(name="hf", source=ModelSource.hf, path=str(folder / "source"))
    config = Config(model=source, quant=W4, rotation=wanted(NAME, "all"), train=TrainConfig(steps, params))
    model = make(NAME, params, W4)
    save_rotations(
        folder / "rotations.safetensors",
        model.bank.snapshot(),
        placements=model.placements,
        online=model.online,
        facts={},
    )
    return FinishedRun(folder, config, {})


@pytest.mark.parametrize("params", OTHERS)
def test_a_finished_run_is_rebuilt_with_what_it_trained(tmp_path: Path, params: Trainable) -> None:
    run, trained = finished(tmp_path, params), make(NAME, params, W4)
    start_scales(trained)
    move(trained)
    saved(trained, tmp_path / "weights.safetensors")
    rebuilt = build_finished(run)
    assert merge_finished(rebuilt) <= 1e-5
    assert not any(parameter.requires_grad for parameter in rebuilt.model.network.parameters())
    expected = logits(trained, make_token_ids())
    assert relative_error(expected, logits(rebuilt.model, make_token_ids())) <= 1e-5
    merge(trained)
    modules = zip(trained.rotated_modules, rebuilt.model.rotated_modules, strict=True)
    for mine, theirs in ((one.weight_quantizers, other.weight_quantizers) for one, other in modules):
        for own, quantizer in mine.items():
            assert quantizer.ratios is theirs[own].ratios is None or torch.equal(quantizer.ratios, theirs[own].ratios)


def test_a_run_of_no_steps_has_trained_nothing(tmp_path: Path) -> None:
    rebuilt = build_finished(finished(tmp_path, Trainable.all, steps=0))
    assert rebuilt.trained is None
    assert merge_finished(rebuilt) <= 1e-5
    expected = make_source(NAME)(make_token_ids()).logits
    assert relative_error(expected, logits(rebuilt.model, make_token_ids())) <= 1e-5


def test_a_run_whose_trained_weights_are_gone_or_others_is_refused(tmp_path: Path) -> None:
    run = finished(tmp_path, Trainable.rotations_and_norms)
    with pytest.raises(ValueError, match=r"run=.*: weights\.safetensors is missing, and it trained rotations_and_norm"):
        build_finished(run)
    saved(make(NAME, Trainable.all), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"weights\.safetensors: lm_head\.weight is not trained here; .* and 24 more"):
        build_finished(run)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, r"model\.norm\.weight is missing"),
        ({"odd": torch.zeros(2)}, r"odd is not trained here"),
        ({NORM: torch.zeros(47)}, r"model\.norm\.weight is \[47\], not \[48\]"),
    ],
)
def test_a_file_of_other_weights_is_refused_and_nothing_read(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    model = make("llama", Trainable.rotations_and_norms)
    before = {key: value.clone() for key, value in model.network.state_dict().items()}
    file = saved(make("llama", Trainable.rotations_and_norms), tmp_path / "weights.safetensors", **changes)
    with pytest.raises(ValueError, match=rf"run=.*weights\.safetensors: {message}; restore the file"):
        load_trained(model, file)
    assert all(torch.equal(value, before[key]) for key, value in model.network.state_dict().items())


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_trained_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    spoiled = torch.ones(48)
    spoiled[7] = value
    model = make("llama", Trainable.rotations_and_norms)
    file = saved(model, tmp_path / "weights.safetensors", **{NORM: spoiled})
    named = "nan" if value != value else "inf"
    with pytest.raises(ValueError, match=rf"run=.*weights\.safetensors: model\.norm\.weight holds {named}; restore "):
        load_trained(model, file)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    model = make("llama", Trainable.rotations_and_norms)
    (tmp_path / "weights.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"weights\.safetensors: cannot be read as safetensors"):
        load_trained(model, tmp_path / "weights.safetensors")
