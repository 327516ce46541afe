"""Every check of `rotexp.testing` passes on rotexp's own parts, and finds each rule broken by a part that breaks it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import get_scheduler

from rotexp.config.schema import COMPONENTS
from rotexp.config.targets import options_of
from rotexp.data.corpora import Corpus, builtin_corpus
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.rotation.start import draw_start
from rotexp.testing import check_data_source, check_objective, check_optimizer, check_scheduler, check_start
from rotexp.training import objectives
from rotexp.training.objectives import CrossEntropy, KLDivergence

ROOT = Path(__file__).parents[2]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "parts"))
    yield importlib.import_module("their_parts")
    del sys.modules["their_parts"]


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.5}, {"step_rule": "paper"}, {"solver": "fixed_point"}], ids=str)
def test_our_optimizer_passes(changes: dict[str, Any]) -> None:
    check_optimizer(CayleySGD, **options_of(COMPONENTS["optimizer"]["cayley_sgd"]) | changes)


@pytest.mark.parametrize("name", COMPONENTS["objective"])
def test_our_objectives_pass(name: str) -> None:
    part = COMPONENTS["objective"][name]
    check_objective(getattr(objectives, part._target_.rpartition(".")[2]), **options_of(part))


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_our_schedules_pass(name: str) -> None:
    def named(optimizer: Any, num_warmup_steps: int, num_training_steps: int) -> Any:
        return get_scheduler(name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps)

    check_scheduler(named)  # type: ignore[arg-type]


class Kind:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, shape: tuple[int, ...], *, name: str, seed: int) -> Tensor:
        return draw_start(self.kind, shape, name=name, seed=seed)


@pytest.mark.parametrize("kind", ["hadamard", "random", "identity"])
def test_our_starts_pass(kind: str) -> None:
    check_start(Kind, kind=kind, ignores_seed=kind == "identity")


class Builtin:
    def read(self) -> Corpus:
        return builtin_corpus()


def test_our_source_passes() -> None:
    check_data_source(Builtin)


def test_theirs_pass(theirs: Any, tmp_path: Path) -> None:
    check_optimizer(theirs.HeavyBall)
    check_objective(theirs.Sharpened, temperature=0.5)
    check_scheduler(theirs.Trapezoid)
    check_scheduler(theirs.Stairs, step_size=4)
    check_start(theirs.Householder)
    (tmp_path / "text").write_text("a text with two halves that differ")
    check_data_source(theirs.Halves, path=str(tmp_path / "text"))


def test_riemannian_adam_of_geoopt_passes() -> None:
    pytest.importorskip("geoopt")
    file = ROOT / "examples" / "plugins" / "geoopt_adam" / "geoopt_adam.py"
    spec = importlib.util.spec_from_file_location("geoopt_adam", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check_optimizer(module.RiemannianAdam, lr=0.1)


class Ours(CayleySGD):
    """A good optimizer, of which each one below breaks a rule."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1, momentum: float = 0.5) -> None:
        super().__init__(list(params), lr=lr, momentum=momentum)

    @property
    def rotations(self) -> list[Tensor]:
        return [rotation for group in self.param_groups for rotation in group["params"]]


class Leaving(Ours):
    """Drifts off the manifold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for rotation in self.rotations:
            if rotation.grad is not None:
                rotation.mul_(1.0 + self.param_groups[0]["lr"] / 1000)


class Climbing(Ours):
    def step(self, closure: Any = None) -> Any:
        for rotation in self.rotations:
            if rotation.grad is not None:
                rotation.grad.neg_()
        super().step()


class Resting(Ours):
    def __init__(self, params: Iterable[Tensor], lr: float = 1e-7) -> None:
        super().__init__(params, lr=lr, momentum=0.0)


class Drawing(Ours):
    def step(self, closure: Any = None) -> Any:
        for rotation in self.rotations:
            if rotation.grad is not None:
                rotation.grad.add_(torch.randn_like(rotation.grad), alpha=1e-3)
        super().step()


class Unskipping(Ours):
    def step(self, closure: Any = None) -> Any:
        for rotation in self.rotations:
            if rotation.grad is None:
                rotation.grad = torch.ones_like(rotation).triu()
        super().step()


class Standing(Ours):
    """Moves only where all have gradients."""

    def step(self, closure: Any = None) -> Any:
        if all(rotation.grad is not None for rotation in self.rotations):
            super().step()


class Demanding(Ours):
    def step(self, closure: Any = None) -> Any:
        for rotation in self.rotations:
            rotation.grad.add_(0.0)  # type: ignore[union-attr]
        super().step()


class Unprojecting(Ours):
    def project(self) -> None: ...


class Resetting(Ours):
    @torch.no_grad()
    def project(self) -> None:
        for rotation in self.rotations:
            rotation.copy_(torch.eye(rotation.shape[-1]).expand_as(rotation))


class Secretive(Ours):
    """Keeps its momentum where no checkpoint finds it."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.0)
        self.previous: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for index, rotation in enumerate(self.rotations):
            if rotation.grad is not None:
                rotation.grad.add_(self.previous.get(index, torch.zeros(())))
                self.previous[index] = 0.5 * rotation.grad.clone()
        super().step()


class Understating(Ours):
    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return {"step": 0}


class Cheapening(Ours):
    """Says less on the meta device, where memory is asked for."""

    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return {"step": 0} if rotation.is_meta else super().initial_state(rotation)


class Listing(Ours):
    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        return {"history": []}


class Fixed(Ours):
    """Has read its learning rate once."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.rate = lr

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = self.rate
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class Switching(Ours):
    """Asks the learning rate whether to move, not how far."""

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.1 if group["lr"] else 0.0
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class Remembering(Ours):
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class Rounding(Ours):
    """Projects in float32, whatever it is given."""

    @torch.no_grad()
    def project(self) -> None:
        super().project()
        for rotation in self.rotations:
            rotation.copy_(rotation.float())


class Narrowing(Ours):
    """Computes with matrices of float32, which one of float64 does not go with."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for rotation in self.rotations:
            if rotation.grad is not None:
                rotation.copy_(torch.eye(rotation.shape[-1]) @ rotation)


class Casting(Ours):
    """Makes rotations float32."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for rotation in self.rotations:
            rotation.grad = None
            rotation.data = rotation.data.float()


class Stateless(Ours):
    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        raise KeyError("momentum")


class Failing(Ours):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no kernel\nfor this")


OPTIMIZERS: dict[Any, str] = {
    Leaving: "step: after 100 a rotation (64, 64) is ",
    Climbing: "step: lowers the loss of a rotation (64, 64) by -",
    Resting: "step: lowers the loss of a rotation (64, 64) by 0.0%",
    Drawing: "step: the same steps give other bits",
    Unskipping: "step: moves a rotation that has no gradient",
    Standing: "step: does not move a rotation that has a gradient",
    Demanding: "step, where a rotation has no gradient: raised AttributeError: ",
    Unprojecting: "project: leaves a matrix ",
    Resetting: "project: replaces a matrix by one that is far from it",
    Secretive: "state: what it holds does not say how to go on",
    Understating: "initial_state: says {'step': 'int'}, and after 3 steps state holds {'momentum_buffer': ",
    Cheapening: "initial_state: is of 0 bytes on the meta device, and 256 are held",
    Listing: "cls(rotations, **options): its initial_state holds history, a list",
    Fixed: "step: moves a rotation although param_groups say lr=0",
    Switching: "step: moves as far at half the lr of param_groups",
    Remembering: "zero_grad: leaves a gradient that is not zero",
    Rounding: "project: leaves a matrix ",
    Stateless: "initial_state: raised KeyError: ",
    Casting: "step: leaves rotations of torch.float64 as torch.float32",
    Narrowing: "step: raised RuntimeError: ",
    Failing: "step: raised RuntimeError: no kernel for this",
    torch.optim.SGD: "project: is missing, and rotexp.optim.protocol.ManifoldOptimizer asks for it",
}


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_each_rule_of_an_optimizer_is_checked(cls: Any) -> None:
    options = {"lr": 0.1} if cls is torch.optim.SGD else {}
    assert broken(lambda: check_optimizer(cls, **options)).startswith(OPTIMIZERS[cls])


def test_options_that_a_class_does_not_take_are_named() -> None:
    assert broken(lambda: check_optimizer(Ours, lrr=1)).startswith("cls(rotations, **options): raised TypeError: ")


def broken(check: Callable[[], None]) -> str:
    with pytest.raises(AssertionError) as caught:
        check()
    line = str(caught.value)
    assert "\n" not in line
    return line


class Summing(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        return len(token_ids) * super().__call__(model, token_ids)


class Perturbed(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        return super().__call__(model, token_ids) + torch.rand(())


class Detached(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        return super().__call__(model, token_ids).detach()


class OfTokens(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        loss: Tensor = model.logits(token_ids).logsumexp(-1).mean(-1)
        return loss


class Unrotating(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        model.mode.rotate = model.mode.quantize = True
        loss = super().__call__(model, token_ids)
        model.mode.quantize = False
        return loss


class Floating(CrossEntropy):
    """Of the float model, which rotations do not change."""

    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        with model.mode.set(rotate=False, quantize=False):
            return super().__call__(model, token_ids)


class Scaling(CrossEntropy):
    @torch.enable_grad()
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        loss = super().__call__(model, token_ids)
        for parameter in model.network.parameters():
            parameter.data.mul_(1.01)
        return loss


class Overflowing(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        return super().__call__(model, token_ids) / 0.0


class Plain(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Any:
        return super().__call__(model, token_ids).item()


class Undecided(CrossEntropy):
    distills: Any = None


class Silent:
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Any: ...


class Insisting(CrossEntropy):
    distills = True

    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        return super().__call__(model, token_ids) + 0 * teacher(token_ids).mean()


class Evaluating(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        model.network.eval()
        return super().__call__(model, token_ids)


class Exercising(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        model.network.lm_head.train()
        return super().__call__(model, token_ids)


class Negated(CrossEntropy):
    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        return 10.0 - super().__call__(model, token_ids)


class Unasking(CrossEntropy):
    """Says that it distills, and does not."""

    distills = True


class Unsaying(KLDivergence):
    distills = False


class Ignoring(KLDivergence):
    """Distills from the model itself although there is a teacher."""

    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        return super().__call__(model, token_ids)


class Teaching(CrossEntropy):
    """Trains the float model to agree with the quantized one."""

    distills = True

    def __call__(self, model: Any, token_ids: Tensor, *, teacher: Any = None) -> Tensor:
        with model.mode.set(rotate=False, quantize=False):
            target = model.logits(token_ids).log_softmax(-1)
        student = model.logits(token_ids).log_softmax(-1)
        return torch.nn.functional.kl_div(student, target, log_target=True, reduction="sum") / token_ids.numel()


OBJECTIVES: dict[Any, str] = {
    Summing: "loss: of a batch is ",
    Perturbed: "loss: is another when asked again",
    Detached: "loss: has no gradient",
    OfTokens: "loss: has the shape (4,) and is no scalar",
    Unrotating: "model.mode: is left changed",
    Floating: "loss: gives not every rotation a gradient",
    Scaling: "model: is left with other parameters or buffers",
    Overflowing: "loss: is inf",
    Plain: "loss: is a float and no tensor",
    Undecided: "distills: is None; True or False is meant",
    Silent: "distills: is missing, and rotexp.training.objectives.protocol.Objective asks for it",
    Evaluating: "model.network: is left in another mode of train() and eval()",
    Exercising: "model.network: is left in another mode of train() and eval()",
    Negated: "loss: of the quantized model is ",
    Unasking: "distills: is True, and the float model is never asked",
    Unsaying: "distills: is False, and the float model is asked",
    Ignoring: "teacher: is given and never asked",
    Teaching: "loss: gives the float model a gradient too",
    Insisting: "cls(**options)(model, token_ids, teacher=…): raised TypeError: ",
}


@pytest.mark.parametrize("cls", OBJECTIVES, ids=lambda cls: cls.__name__)
def test_each_rule_of_an_objective_is_checked(cls: Any) -> None:
    assert broken(lambda: check_objective(cls)).startswith(OBJECTIVES[cls])


def scheduler(rate: Callable[[Any, int], Any]) -> Any:
    """Return a scheduler class that sets what a function of the optimizer and the step says."""

    class Made:
        def __init__(self, optimizer: Any, num_warmup_steps: int, num_training_steps: int) -> None:
            self.optimizer, self.steps = optimizer, -1
            self.step()

        def step(self) -> None:
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = rate(self.optimizer, self.steps)

    return Made


class OneGroup(torch.optim.lr_scheduler.StepLR):
    """Leaves the rates of the second group as they are."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, step_size=3)

    def get_lr(self) -> Any:
        first, *_ = super().get_lr()
        return [first, *(group["lr"] for group in self.optimizer.param_groups[1:])]


SCHEDULERS: dict[str, tuple[Any, str]] = {
    "negative": (scheduler(lambda _, step: 0.1 - 0.05 * step), "step: sets lr=[-"),
    "nan": (scheduler(lambda *_: float("nan")), "step: sets lr=[nan, nan]"),
    "tensor": (scheduler(lambda *_: torch.ones(())), "step: sets lr=[tensor(1.), tensor(1.)], which are no floats"),
    "zero": (scheduler(lambda *_: 0.0), "step: leaves every learning rate at zero"),
    "random": (
        scheduler(lambda *_: torch.rand(()).item()),
        "step: sets other rates when the same calls are made",
    ),
    "plateau": (
        lambda optimizer, *_: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "step: raised TypeError: ",
    ),
    "options": (lambda: None, "cls(optimizer, **options): raised TypeError: "),
    "one group": (OneGroup, "step: changes the learning rates of some groups alone"),
    "none": (lambda *_: None, "step: is missing, and rotexp.training.schedulers.Scheduler asks for it"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_rule_of_a_scheduler_is_checked(name: str) -> None:
    cls, line = SCHEDULERS[name]
    assert broken(lambda: check_scheduler(cls)).startswith(line)


def starting(draw: Callable[[tuple[int, ...]], Any]) -> Any:
    class Made:
        def __call__(self, shape: tuple[int, ...], *, name: str, seed: int) -> Any:
            return draw(shape)

    return Made


STARTS: dict[str, tuple[Any, str]] = {
    "long": (
        starting(lambda shape: 1.01 * torch.eye(shape[-1]).expand(shape)),
        "cls(**options)((64, 64), …): is 2.0e",
    ),
    "one block": (
        starting(lambda shape: torch.eye(shape[-1])),
        "cls(**options)((4, 32, 32), …): has the shape (32",
    ),
    "half": (
        starting(lambda shape: torch.eye(shape[-1]).half().expand(shape)),
        "cls(**options)((64, 64), …): has th",
    ),
    "list": (starting(lambda shape: [shape]), "cls(**options)((64, 64), …): is a list and no tensor"),
    "global": (
        starting(lambda shape: torch.linalg.qr(torch.randn(shape))[0]),
        "cls(**options)((64, 64), …): draws o",
    ),
    "unseeded": (
        starting(lambda shape: torch.eye(shape[-1]).flip(-1).expand(shape)),
        "cls(**options)(…): draws the same for every seed",
    ),
    "none": (lambda: None, "__call__: is missing, and rotexp.rotation.start.RotationStart asks for it"),
    "raising": (starting(lambda shape: shape[7]), "cls(**options)((64, 64), name='R1', seed=0): raised IndexError: "),
}


@pytest.mark.parametrize("name", STARTS)
def test_each_rule_of_a_start_is_checked(name: str) -> None:
    cls, line = STARTS[name]
    assert broken(lambda: check_start(cls)).startswith(line)


def test_a_start_that_is_said_to_ignore_the_seed_must() -> None:
    line = broken(lambda: check_start(Kind, kind="random", ignores_seed=True))
    assert line.startswith("cls(**options)(…): draws others for another seed")


COUNT = iter(range(100))


def reading(read: Callable[[], Any]) -> Any:
    class Made:
        def read(self) -> Any:
            return read()

    return Made


SOURCES: dict[str, tuple[Any, str]] = {
    "tuple": (reading(lambda: ("a", "b")), "read: read() returned a tuple and not a rotexp.data.corpora.Corpus"),
    "empty": (reading(lambda: Corpus("text", " ")), "read: the evaluation text that read() returned is empty"),
    "bytes": (reading(lambda: Corpus(b"text", "b")), "read: the calibration text that read() returned is a bytes"),  # type: ignore[arg-type]
    "same": (reading(lambda: Corpus("One text.", "one  TEXT.")), "read: gives the same text twice"),
    "other": (reading(lambda: Corpus(f"text {next(COUNT)}", "b")), "read: gives other texts at the next call"),
    "none": (object, "read: is missing, and rotexp.data.source.TextSource asks for it"),
    "raising": (reading(lambda: int("x")), "read: raised ValueError: "),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_rule_of_a_source_is_checked(name: str) -> None:
    cls, line = SOURCES[name]
    assert broken(lambda: check_data_source(cls)).startswith(line)
