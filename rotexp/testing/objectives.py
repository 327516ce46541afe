"""Check that an objective is a mean loss of the rotated and quantized model, with a gradient of the rotations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotexp.config.schema import Config
from rotexp.models.load import open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.building import build_for_run, build_plain
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.testing.rules import check_members, disturb, rule
from rotexp.training.objectives.protocol import Objective, Teacher
from rotexp.training.options import Trainable, TrainConfig

BLOCKS, TOKENS = 4, 12
RELATIVE = 1e-4
"""By how much the loss of a batch may differ from the mean of those of its halves, in float32."""
SHARPNESS = 20.0
"""Factor on the head of random weights, without which the float model would be as unsure as the quantized one."""

CPU = torch.device("cpu")
CONFIG = Config(
    model=ModelConfig("random_llama", ModelSource.random, size="nano"),
    quant=QuantConfig("w4a4", weights=QuantSpec(4), activations=QuantSpec(4, symmetric=False)),
    rotation=RotationConfig("learned", init=RotationInit.random),
    train=TrainConfig(params=Trainable.all),
)


def check_objective(cls: type[Any], **options: Any) -> None:
    """Let an objective measure a small Llama with random weights, in 4 bits, with and without a second teacher.

    The text is what the float model itself would write, so that quantization makes every sensible loss greater.

    Args:
        cls: called as `cls(**options)`, see `rotexp.training.objectives.protocol.Objective`.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    with rule("cls(**options)"):
        objective: Objective = cls(**options)
    check_members(objective, Objective)
    assert isinstance(objective.distills, bool), f"distills: is {objective.distills!r}; True or False is meant"
    model, float_model = _model(), _FloatModel()
    token_ids = _text_of(float_model)
    _check_loss(objective, model, token_ids, teacher=None)
    _check_float_model(objective, model, token_ids)
    if objective.distills:
        float_model.asked = 0
        _check_loss(objective, model, token_ids, teacher=float_model)
        assert float_model.asked, "teacher: is given and never asked, although distills=True"


def _check_loss(objective: Objective, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None) -> None:
    _check_leaves_model(objective, model, token_ids, teacher)
    disturb(1)
    loss = _loss(objective, model, token_ids, teacher)
    disturb(2)
    again = _loss(objective, model, token_ids, teacher)
    assert torch.equal(again, loss), "loss: is another when asked again; draw nothing from global generators"
    halves = [_loss(objective, model, half, teacher).item() for half in token_ids.chunk(2)]
    mean = sum(halves) / 2
    assert abs(loss.item() - mean) <= RELATIVE * max(abs(mean), 1e-3), (
        f"loss: of a batch is {loss.item():.6g}, and the mean of its halves' {mean:.6g}; average over blocks, "
        f"since ranks split the batch"
    )
    with model.mode.set(rotate=True, quantize=False):
        least = _loss(objective, model, token_ids, teacher).item()
    assert loss.item() > least, (
        f"loss: of the quantized model is {loss.item():.6g}, and {least:.6g} without quantization on text that the "
        f"float model wrote; training lowers the loss, so what is worse must be greater"
    )


def _check_leaves_model(objective: Objective, model: RotatedModel, token_ids: Tensor, teacher: Teacher | None) -> None:
    """Check that there is a gradient of every rotation, and that the model is afterwards as it was before."""
    before, mode = _state(model), (model.mode.rotate, model.mode.quantize)
    for training in (True, False):  # a run's is False; each finds what sets the other
        model.network.train(training)
        loss = _loss(objective, model, token_ids, teacher)
        same = all(module.training is training for module in model.network.modules())
        assert same, "model.network: is left in another mode of train() and eval()"
    with rule("backward of the loss"):
        loss.backward()  # type: ignore[no-untyped-call]
    for _, rotation in model.bank.items():
        gradient = rotation.grad
        given = gradient is not None and gradient.any() and gradient.isfinite().all()
        assert given, "loss: gives not every rotation a gradient that is finite and not zero"
    model.network.zero_grad()
    assert (model.mode.rotate, model.mode.quantize) == mode, "model.mode: is left changed; use `with model.mode.set(…)`"
    same = all(torch.equal(value, before[name]) for name, value in _state(model).items())
    assert same, "model: is left with other parameters or buffers"


def _check_float_model(objective: Objective, model: RotatedModel, token_ids: Tensor) -> None:
    """Check that the model without quantization is asked where, and only where, `distills` says so, and not trained."""
    targets: list[Tensor] = []

    def keep(network: Any, given: Any, output: Any) -> None:  # noqa: ARG001 (a hook's)
        if not model.mode.quantize:
            answers: Tensor = getattr(output, "logits", output)  # or what was read of them in chunks
            targets.append(answers)
            if answers.requires_grad:
                answers.retain_grad()

    handle = model.network.register_forward_hook(keep)
    _loss(objective, model, token_ids, None).backward()  # type: ignore[no-untyped-call]
    handle.remove()
    model.network.zero_grad()
    asked = "asked" if targets else "never asked"
    assert objective.distills is bool(targets), f"distills: is {objective.distills}, and the float model is {asked}"
    trained = any(target.grad is not None for target in targets)
    assert not trained, "loss: gives the float model a gradient too; ask it under torch.no_grad()"


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


def _model() -> RotatedModel:
    checkpoint = open_checkpoint(CONFIG.model, seed=CONFIG.seed)
    model = build_for_run(checkpoint, CONFIG, dtype=torch.float32)
    materialize(model.network, checkpoint, device=CPU, added=model.added)
    _sharpen(model)
    prepare(model)
    model.mode.rotate = model.mode.quantize = True
    return model


@torch.no_grad()
def _sharpen(model: RotatedModel) -> None:
    *_, head = model.units
    for weight in head.parameters():
        weight.mul_(SHARPNESS)


class _FloatModel:
    """A teacher that counts how often it is asked."""

    def __init__(self) -> None:
        checkpoint = open_checkpoint(CONFIG.model, seed=CONFIG.seed)
        self._model = build_plain(checkpoint, dtype=torch.float32)
        materialize(self._model.network, checkpoint, device=CPU)
        _sharpen(self._model)
        self.asked = 0

    @torch.no_grad()
    def __call__(self, token_ids: Tensor) -> Tensor:
        self.asked += 1
        return self._model.logits(token_ids)


def _text_of(float_model: _FloatModel) -> Tensor:
    """Return blocks (blocks, tokens) that each begin with a token of their own and go on with the likeliest."""
    token_ids = torch.arange(1, BLOCKS + 1)[:, None]
    while token_ids.shape[1] < TOKENS:
        token_ids = torch.cat([token_ids, float_model(token_ids)[:, -1:].argmax(-1)], dim=1)
    return token_ids
