"""Check that an objective is a mean loss of the rotated and quantized model, with a gradient of the rotations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from rotexp.models.arch import find_spec
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.placement import place
from rotexp.testing.rules import check_members, disturb, rule
from rotexp.training.objectives.protocol import Objective, Teacher

VOCABULARY = 64
BLOCKS, TOKENS = 4, 12
RELATIVE = 1e-4
"""By how much the loss of a batch may differ from the mean of those of its halves, in float32."""


def check_objective(cls: type[Any], **options: Any) -> None:
    """Let an objective measure a small Llama with random weights, in 4 bits, with and without a second teacher.

    Args:
        cls: called as `cls(**options)`, see `rotexp.training.objectives.protocol.Objective`.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    with rule("cls(**options)"):
        objective: Objective = cls(**options)
    check_members(objective, Objective)
    assert isinstance(objective.distills, bool), f"distills: is {objective.distills!r}; True or False is meant"
    token_ids = torch.randint(VOCABULARY, (BLOCKS, TOKENS), generator=torch.Generator().manual_seed(0))
    model = _model()
    _check_loss(objective, model, token_ids, teacher=None)
    if objective.distills:
        _check_loss(objective, model, token_ids, teacher=_float_model())


def _check_loss(objective: Objective, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None) -> None:
    before, mode = _state(model), (model.mode.rotate, model.mode.quantize)
    disturb(1)
    loss = _loss(objective, model, token_ids, teacher)
    with rule("backward of the loss"):
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [rotation.grad for _, rotation in model.bank.items()]
    for gradient in gradients:
        given = gradient is not None and gradient.any() and gradient.isfinite().all()
        assert given, "loss: gives not every rotation a gradient that is finite and not zero"
    model.network.zero_grad()
    assert (model.mode.rotate, model.mode.quantize) == mode, "model.mode: is left changed; use `with model.mode.set(…)`"
    same = all(torch.equal(value, before[name]) for name, value in _state(model).items())
    assert same, "model: is left with other parameters or buffers"
    disturb(2)
    again = _loss(objective, model, token_ids, teacher)
    assert torch.equal(again, loss), "loss: is another when asked again; draw nothing from global generators"
    halves = [_loss(objective, model, half, teacher).item() for half in token_ids.chunk(2)]
    mean = sum(halves) / 2
    assert abs(loss.item() - mean) <= RELATIVE * max(abs(mean), 1e-3), (
        f"loss: of a batch is {loss.item():.6g}, and the mean of its halves' {mean:.6g}; average over blocks, "
        f"since ranks split the batch"
    )


def _loss(objective: Objective, model: RotatedModel, token_ids: Tensor, teacher: Teacher | None) -> Tensor:
    with rule("cls(**options)(model, token_ids, teacher=…)"):
        loss = objective(model, token_ids, teacher=teacher)
    assert isinstance(loss, Tensor), f"loss: is a {type(loss).__name__} and no tensor"
    assert loss.shape == (), f"loss: has the shape {tuple(loss.shape)} and is no scalar"
    assert loss.isfinite(), f"loss: is {loss.item()}"
    assert loss.requires_grad, "loss: has no gradient"
    return loss


def _state(model: RotatedModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.network.state_dict().items()}


def _llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.float32)


def _model() -> RotatedModel:
    network = _llama()
    quant = QuantConfig("w4a4", weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False))
    rotation = RotationConfig("learned", init=RotationInit.random)
    model = place(network, find_spec(network), rotation, quant, seed=0)
    prepare(model)
    model.mode.rotate = model.mode.quantize = True
    return model


def _float_model() -> Teacher:
    network = _llama()

    @torch.no_grad()
    def teacher(token_ids: Tensor) -> Tensor:
        logits: Tensor = network(token_ids, use_cache=False).logits
        return logits

    return teacher
