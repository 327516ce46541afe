"""Rotations within the quantizers of inputs: the rotated stream's model and gradients for half of its products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, logits, make_source, make_token_ids, rotated, wanted
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rotexp.models.arch import decoder_layers
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.invariance import relative_error, trace
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.proof import merge_and_prove
from rotexp.rotation.trainable import train_also
from rotexp.rotation.trial import _Widened
from rotexp.rotation.within import quantize_within
from rotexp.training.options import Trainable

QUICK = {"llama", "qwen2_moe", "gemma2 with binding caps", "opt"}
"""Families that stand for all: RMSNorm, experts and routers, a family without R1, LayerNorm with biases."""

EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
OFF = QuantSpec()
SPECS = {
    "asymmetric": QuantSpec(4, symmetric=False),
    "symmetric": QuantSpec(4),
    "groups": QuantSpec(4, symmetric=False, group_size=8),
    "clipping": QuantSpec(4, symmetric=False, clip_ratio=0.7),
}
W16A4 = QuantConfig(activations=SPECS["asymmetric"])
CLIPPING = QuantConfig(activations=SPECS["clipping"])
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
TANGENT = 1e-10
"""Largest difference of two forms' logits, and of their gradients along rotations, relative to the largest; float64."""


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(*shape: int, seed: int) -> Tensor:
    rotation: Tensor = torch.linalg.qr(normal(*shape, seed=seed))[0]
    return rotation.contiguous()


def straight_through(x: Tensor, spec: QuantSpec) -> Tensor:
    """Quantize groups in numpy; the gradient passes where the rounded code is within its range."""
    values = x.detach().numpy().reshape(*x.shape[:-1], -1, spec.group_size or x.shape[-1])
    low, high = np.minimum(values.min(-1, keepdims=True), 0), np.maximum(values.max(-1, keepdims=True), 0)
    if spec.symmetric:
        scale = np.maximum(-low, high) * spec.clip_ratio / 7
        first, last = np.full_like(scale, -8), np.full_like(scale, 7)
    else:
        scale = (high - low) * spec.clip_ratio / 15
        first = -np.rint(-low * spec.clip_ratio / scale)
        last = first + 15
    codes = np.rint(values / scale)
    bounded = np.clip(codes, first, last)
    passes = torch.from_numpy((codes == bounded) | (spec.clip_ratio == 1.0)).reshape(x.shape)
    passing = x * passes
    return passing + (torch.from_numpy(bounded * scale).reshape(x.shape) - passing).detach()


def dense(matrix: Tensor, width: int) -> Tensor:
    """Write a rotation out: its own blocks, or one matrix as often as it fits."""
    blocks = list(matrix) if matrix.ndim == 3 else [matrix] * (width // matrix.shape[-1])
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize(("shape", "width"), [((64, 64), 64), ((256, 256), 256), ((16, 16), 48), ((3, 16, 16), 48)])
def test_values_and_gradients_are_those_of_the_dense_formula(
    shape: tuple[int, ...], width: int, spec: QuantSpec
) -> None:
    """Q(x R) Rᵀ, and autograd of x + (Q(x R) − x R) Rᵀ, straight through Q where it does not clip."""
    rotation = RotationBank().add("R1", orthogonal(*shape, seed=0))
    x, upstream = normal(2, 5, width, seed=1).requires_grad_(), normal(2, 5, width, seed=2)
    full = dense(rotation.matrix, width)
    quantized = straight_through(x @ full, spec)
    expected = x + (quantized - x @ full) @ full.T
    torch.testing.assert_close(expected, quantized @ full.T, **EXACT)
    result = quantize_within(x, rotation, FakeQuantizer(spec))
    torch.testing.assert_close(result, expected, **EXACT)
    leaves = (x, rotation.matrix)
    for mine, theirs in zip(
        torch.autograd.grad(result, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_once_and_gradients_of_rotations_stay_exact(dtype: torch.dtype) -> None:
    """To half a unit in the last place, besides codes of neighbors where float32 rounds a tie the other way."""
    matrix = orthogonal(64, 64, seed=0)
    x = normal(50, 64, seed=1).to(dtype).requires_grad_()
    upstream = normal(50, 64, seed=2).to(dtype)
    narrow, wide = (RotationBank().add("R1", matrix.to(kind)) for kind in (torch.float32, torch.float64))
    exact = x.detach().double().requires_grad_()
    result = quantize_within(x, narrow, FakeQuantizer(SPECS["asymmetric"]))
    expected = quantize_within(exact, wide, FakeQuantizer(SPECS["asymmetric"]))
    assert result.dtype is dtype
    unit = torch.finfo(dtype).eps
    assert ((result.double() - expected).abs() / expected.abs().clamp(min=1e-2)).max() <= 0.51 * unit
    result.backward(upstream)
    expected.backward(upstream.double())
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)
    assert narrow.matrix.grad is not None
    assert wide.matrix.grad is not None
    assert relative_error(wide.matrix.grad, narrow.matrix.grad.double()) <= 1e-5


def test_an_input_that_is_not_quantized_is_returned_itself() -> None:
    x = normal(2, 8, seed=1)
    assert quantize_within(x, RotationBank().add("R1", orthogonal(8, 8, seed=0)), FakeQuantizer(OFF)) is x


@pytest.fixture
def exactly() -> Iterator[None]:
    """Let models compute in float64 what they compute in float32, so that forms differ by its rounding alone."""
    with _Widened():
        yield


def placed(
    name: str,
    placement: str,
    quant: QuantConfig = W16A4,
    *,
    params: Trainable = Trainable.rotations,
    **changes: Any,
) -> RotatedModel:
    """Return a family's model in float64, its rotations random and orthogonal to the last bit, prepared.

    Without R4, in whose blocks a lone positive value (of a squared ReLU) has twins that lie between two codes.
    """
    source = make_source(name, dtype=torch.float64, **changes)
    source.set_experts_implementation("eager")  # the other ones have no float64
    model = rotated(source, replace(wanted(name, placement), r4=False), quant, ready=False)
    train_also(model, params)
    prepare(model)
    for index, (_, matrix) in enumerate(model.bank.items()):
        matrix.data = orthogonal(*matrix.shape, seed=index)
    return model


@contextmanager
def turning(model: RotatedModel) -> Iterator[None]:
    """Rotate what flows, as where weights are quantized, inside the block."""
    within, model.mode.within = model.mode.within, frozenset()
    try:
        yield
    finally:
        model.mode.within = within


def tangent(matrix: Tensor, gradient: Tensor) -> Tensor:
    """Return Rᵀ G's skew part: all that moves a rotation R along the orthogonal matrices."""
    product = matrix.mT @ gradient
    return 0.5 * (product - product.mT)


def gradients(model: RotatedModel, token_ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of the quantized model, and each rotation's gradient of a loss of them."""
    with model.mode.set(rotate=True, quantize=True):
        result = model.logits(token_ids)
        found = torch.autograd.grad(result.square().mean(), [matrix for _, matrix in model.bank.items()])
    return result.detach(), dict(zip(dict(model.bank.items()), found, strict=True))


def assert_the_same_training(model: RotatedModel, token_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Compare logits and gradients along rotations with those of the rotated stream; return both forms' gradients."""
    result, within = gradients(model, token_ids)
    with turning(model):
        expected, turned = gradients(model, token_ids)
    assert relative_error(expected, result) <= TANGENT
    for key, matrix in model.bank.items():
        mine, theirs = (tangent(matrix.detach(), found[key]) for found in (within, turned))
        assert theirs.abs().max() > 0, key
        assert relative_error(theirs, mine) <= TANGENT, key
    return {key: (turned[key], within[key]) for key in within}


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize(
    ("placement", "quant"),
    [("all", W16A4), ("blocks", CLIPPING)],
    ids=["whole", "in blocks, clipping"],
)
@pytest.mark.parametrize("name", EVERY)
def test_logits_and_gradients_along_rotations_are_those_of_the_rotated_stream(
    name: str, placement: str, quant: QuantConfig
) -> None:
    """Normal to the orthogonal matrices they differ: there lies the float model's part, which is none of training's."""
    model, token_ids = placed(name, placement, quant), make_token_ids()
    assert model.mode.within == dict(model.bank.items()).keys()
    for key, (turned, within) in assert_the_same_training(model, token_ids).items():
        assert relative_error(turned, within) > 1e-3, key


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("name", EVERY)
def test_a_merged_model_computes_what_was_trained(name: str) -> None:
    model, token_ids = placed(name, "all"), make_token_ids()
    before = logits(model, token_ids, quantize=True)
    merge(model)
    assert relative_error(before, logits(model, token_ids, quantize=True)) <= TANGENT
    assert model.turned_residual is None


@pytest.mark.usefixtures("exactly")
@pytest.mark.slow
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_orders_of_256_and_64_and_two_threads(threads: int) -> None:
    assert torch.get_num_threads() == threads
    model, token_ids = placed("llama", "all", hidden_size=256, num_hidden_layers=1), make_token_ids()
    assert {len(matrix) for _, matrix in model.bank.items()} == {256, 64}
    assert_the_same_training(model, token_ids)


def hidden_states(model: RotatedModel, token_ids: Tensor, *, rotate: bool, quantize: bool) -> tuple[Tensor, bool]:
    """Return what enters the first layer, and whether the model says that it is rotated."""
    seen: list[Tensor] = []
    layer = decoder_layers(model.network, model.spec)[0]
    hook = layer.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with model.mode.set(rotate=rotate, quantize=quantize), torch.no_grad():
        model.logits(token_ids)
        turned = model.turned_residual is not None
    hook.remove()
    return seen[0], turned


@pytest.mark.parametrize("quant", [W16A4, QuantConfig(weights=QuantSpec(4), activations=QuantSpec(4)), QuantConfig()])
def test_the_model_says_whether_its_stream_is_rotated(quant: QuantConfig) -> None:
    model, token_ids = rotated(make_source("llama"), wanted("llama", "all"), quant), make_token_ids()
    embeddings = hidden_states(model, token_ids, rotate=False, quantize=False)[0]
    assert model.residual is not None
    rotated_embeddings = model.residual.rotate(embeddings)
    for rotate, quantize in itertools.product((False, True), repeat=2):
        states, turned = hidden_states(model, token_ids, rotate=rotate, quantize=quantize)
        assert turned is (rotate and not (quantize and quant is W16A4))
        assert torch.equal(states, rotated_embeddings if turned else embeddings)


KV = QuantConfig(activations=SPECS["asymmetric"], kv=SPECS["asymmetric"])


@pytest.mark.parametrize(
    ("quant", "within"),
    [
        (W16A4, {"R1", "R2_0", "R2_1"}),
        (KV, {"R1"}),
        (QuantConfig(kv=SPECS["asymmetric"]), set()),
        (QuantConfig(), set()),
        (QuantConfig(weights=QuantSpec(4)), set()),
        (QuantConfig(weights=QuantSpec(4), activations=QuantSpec(4)), set()),
    ],
    ids=["w16a4", "w16a4kv4", "w16a16kv4", "none", "w4a16", "w4a4"],
)
def test_which_rotations_act_within_and_that_every_one_is_trained(quant: QuantConfig, within: set[str]) -> None:
    model = rotated(make_source("llama"), wanted("llama", "all"), quant)
    assert model.mode.within == within
    with model.mode.set(rotate=True, quantize=True):
        model.logits(make_token_ids()).square().mean().backward()
    for name, matrix in model.bank.items():
        assert matrix.grad is not None, name


@pytest.mark.usefixtures("exactly")
def test_quantized_values_are_rotated_while_the_stream_is_not() -> None:
    model, token_ids = placed("llama", "all", KV), make_token_ids()
    assert_the_same_training(model, token_ids)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("params", [Trainable.rotations_and_norms, Trainable.all])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_trained_norms_act_on_a_rotated_stream(name: str, params: Trainable) -> None:
    """Their gains are those of a rotated basis, in which they stay behind when rotations are merged."""
    model, token_ids = placed(name, "all", params=params), make_token_ids()
    assert model.mode.within == {"R2_0", "R2_1"}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.network.modules():
            if "norm" in type(module).__name__.lower():
                module.weight.mul_(torch.rand(module.weight.shape, generator=generator) + 0.5)
    before = logits(model, token_ids, quantize=True)
    merge(model)
    assert relative_error(before, logits(model, token_ids, quantize=True)) <= TANGENT


def test_norms_that_are_trained_without_saying_so_in_time_are_no_part_of_a_merge() -> None:
    model, token_ids = rotated(make_source("llama"), wanted("llama", "all"), W16A4), make_token_ids()
    original, before = trace(model, token_ids, rotate=False), logits(model, token_ids, quantize=True)
    model.network.get_submodule("model.norm").requires_grad_()
    with pytest.raises(ValueError, match=r"^merge: norms require gradients .* before rotexp\.prepare$"):
        merge_and_prove(model, original, dtype=torch.float32, weights_trained=True)
    assert torch.equal(logits(model, token_ids, quantize=True), before)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("name", ["llama", "mixtral", "opt"])
def test_trained_weights_get_the_gradients_that_they_have_in_the_rotated_stream(name: str) -> None:
    model, token_ids = placed(name, "all"), make_token_ids()
    trained = [p for n, p in model.network.named_parameters() if "proj" in n or "embed" in n or "lm_head" in n]
    for parameter in trained:
        parameter.requires_grad_()

    def find() -> tuple[Tensor, ...]:
        with model.mode.set(rotate=True, quantize=True):
            loss = model.logits(token_ids).square().mean()
        return torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)

    mine = find()
    with turning(model):
        theirs = find()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def products(model: RotatedModel, token_ids: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, model.mode.set(rotate=True, quantize=True):
        model.logits(token_ids).square().mean().backward()
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize("quant", [W16A4, CLIPPING], ids=["w16a4", "clipping"])
def test_a_step_takes_three_products_for_each_input_and_none_for_what_writes_or_ends(quant: QuantConfig) -> None:
    """Beyond the same step without rotations; clipping takes three products more."""
    source, token_ids = make_source("llama"), make_token_ids()
    bare = rotated(source, RotationConfig(r1=False, r2=False), quant)
    bare.network.get_input_embeddings().weight.requires_grad_()
    tokens, each = token_ids.numel(), 3 if quant is W16A4 else 6
    for rotation in (RotationConfig(r1=True, r2=False), RotationConfig(r1=True, r2=True)):
        model = rotated(source, rotation, quant)
        model.network.get_input_embeddings().weight.requires_grad_()  # lest the first layer have no gradients to form
        readers = [module for module in model.rotated_modules if isinstance(module, RotatedLinear)]
        inputs = {reader.shared: reader for reader in readers if reader.input_quantizer.spec.enabled}
        expected = sum(tokens * reader.weight.shape[1] * reader.shape().input_order for reader in inputs.values())
        assert expected > 0
        assert products(model, token_ids) - products(bare, token_ids) == each * expected


def test_readers_of_one_input_share_it_and_keep_its_errors_alone() -> None:
    """Kept for the backward pass: e of each quantized input, besides what a model without rotations keeps."""
    source, token_ids = make_source("llama"), make_token_ids()

    def kept(rotation: RotationConfig) -> int:
        model = rotated(source, rotation, W16A4)
        model.network.get_input_embeddings().weight.requires_grad_()
        held: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with model.mode.set(rotate=True, quantize=True), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model.logits(token_ids).square().mean()
            parameters = {p.untyped_storage().data_ptr() for p in model.network.parameters()}
            size = sum(t.untyped_storage().nbytes() for p, t in held.items() if p not in parameters)
        assert loss.requires_grad
        return size

    without, with_r1 = kept(RotationConfig(r1=False, r2=False)), kept(RotationConfig(r1=True, r2=False))
    hidden = source.config.hidden_size
    assert with_r1 - without == 2 * source.config.num_hidden_layers * token_ids.numel() * hidden * 4
