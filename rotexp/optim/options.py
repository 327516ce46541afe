"""The optimizer options a config may name, kept free of torch so that a config can be read without it."""

import math
from dataclasses import dataclass
from enum import Enum

FIXED_POINT_ERROR = 1e-5
"""The largest distance from orthogonality that one step by fixed point may cause under the angle rule."""


class StepRule(Enum):
    """How far one step moves a rotation."""

    paper = "paper"
    angle = "angle"


class Solver(Enum):
    """How the Cayley transform is evaluated: to rounding, or by a fixed number of matrix products."""

    exact = "exact"
    fixed_point = "fixed_point"


@dataclass(frozen=True)
class CayleySGDOptions:
    """The options of `rotexp.optim.cayley_sgd.CayleySGD`.

    Attributes:
        lr: the learning rate. For the angle rule the largest rotation angle of a step, in radians; for the paper rule
            the length of the step along the projected gradient, which the cap usually replaces.
        momentum: weight in [0, 1) of the earlier generators. Off by default: at 0.9 it spoiled the measured runs.
        step_rule: angle (the default, better on average at its default rate: docs/training.md) sizes the step by
            what it does; paper caps the learning rate so that the fixed point contracts, as published.
        solver: exact (the default) is to rounding and the faster one too. Steps that are short enough, in float32
            by a learning rate up to 0.95 of the angle rule and by any of the paper rule, are products alone then,
            longer ones a factorization: by the options alone, so every rank does the same.
        fixed_point_iterations: products of the fixed-point solver after the first. 5 keep float32 accuracy at the angle
            rule's default learning rate; the paper rule's longest steps, half as long as where the fixed point stops
            converging, are then up to 2 · 0.5^7 = 0.016 from exact, and from orthogonal.
        retract_every: steps between two QR retractions, 0 for none. In 100 steps float32 drifts by 1e-6, and by
            factorizations by 4e-6.
    """

    lr: float = 0.1
    momentum: float = 0.0
    step_rule: StepRule = StepRule.angle
    solver: Solver = Solver.exact
    fixed_point_iterations: int = 5
    retract_every: int = 100

    @property
    def lr_limit(self) -> float:
        """What the learning rate must stay below: half a turn, or where the fixed point no longer converges in time."""
        if self.step_rule is StepRule.paper:
            return math.inf
        if self.solver is Solver.exact:
            return math.pi
        # The step's error is at most 2 tan^(iterations + 2) of half the angle, and R Rᵀ − I twice an error along R.
        half_tangent = (0.25 * FIXED_POINT_ERROR) ** (1.0 / (self.fixed_point_iterations + 2))
        return 2.0 * math.atan(half_tangent)

    @property
    def uses_gradient_length(self) -> bool:
        """Whether a longer gradient makes another step; the angle rule without momentum divides its length away."""
        return self.step_rule is StepRule.paper or self.momentum > 0.0

    def validate(self, key: str) -> None:
        """Refuse values without a meaning.

        Args:
            key: the config key of these options, used in messages.

        Raises:
            ValueError: naming the key, the value, the allowed values and the remedy.
        """
        _require_enum(self.step_rule, StepRule, key=f"{key}.step_rule")
        _require_enum(self.solver, Solver, key=f"{key}.solver")
        _require_integer(self.fixed_point_iterations, 1, key=f"{key}.fixed_point_iterations", remedy="5 is the default")
        _require_integer(self.retract_every, 0, key=f"{key}.retract_every", remedy="0 switches retractions off")
        self.validate_lr(key, allow_zero=False)
        if not _is_number(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"{key}.momentum={self.momentum} is not a number in [0, 1); 0.0 switches momentum off")

    def validate_lr(self, key: str, *, allow_zero: bool) -> None:
        """Refuse a learning rate out of range; a scheduler may set zero, a user may not.

        Args:
            key: the config key of these options, used in messages.
            allow_zero: whether zero is in range.

        Raises:
            ValueError: naming the key, the value, the allowed values and the remedy.
        """
        positive = _is_number(self.lr) and (self.lr > 0.0 or (allow_zero and self.lr == 0.0))
        if positive and self.lr < self.lr_limit:
            return
        interval = f"{'[' if allow_zero else '('}0, {self.lr_limit:.4g})"
        remedy = "choose another, or step_rule=paper"
        if self.solver is Solver.fixed_point:
            remedy = "choose another, raise fixed_point_iterations, or set solver=exact"
        raise ValueError(
            f"{key}.lr={self.lr} is not a number in {interval} for step_rule={self.step_rule.value}, "
            f"solver={self.solver.value}; {remedy}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_enum(value: object, choices: type[Enum], *, key: str) -> None:
    if not isinstance(value, choices):
        raise ValueError(f"{key}={value} is not one of {', '.join(choice.name for choice in choices)}; choose one")


def _require_integer(value: object, minimum: int, *, key: str, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{key}={value} is not an integer of at least {minimum}; {remedy}")


@dataclass(frozen=True)
class CayleySGDConfig(CayleySGDOptions):
    """`optimizer=cayley_sgd`: the options of `rotexp.optim.cayley_sgd.CayleySGD`.

    Attributes:
        name: what tables and W&B call the option that was chosen.
    """

    name: str = "cayley_sgd"
    _target_: str = "rotexp.optim.cayley_sgd.CayleySGD"
