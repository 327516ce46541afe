"""Stochastic gradient descent on square orthogonal matrices by the Cayley transform."""

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from rotexp.optim.options import CayleySGDOptions, Solver, StepRule
from rotexp.orthogonal import stiefel

CONTRACTION = 0.5
EPSILON = 1e-8
ORTHOGONAL = 1e-2
"""Largest max|R Rᵀ − I| of a matrix taken for a rotation; long training and TensorFloat-32 stay far below it."""
OPTION_NAMES = tuple(option.name for option in dataclasses.fields(CayleySGDOptions))

Choice = TypeVar("Choice", bound=Enum)


class CayleySGD(Optimizer):
    """Moves rotations R by R ← (I + ½αA)⁻¹ (I − ½αA) R, where A = G Rᵀ − R Gᵀ is the skew generator of the gradient G.

    All rotations of one size in a group, and all blocks of that size, are stepped as one batch, in the order given,
    without randomness and without the host waiting for the device; a block moves as a rotation of its own would.
    Parameters without a gradient are skipped. A gradient that is not finite spoils its own rotation: decide about
    skipping a step before calling `step`.

    Step rules: `angle` chooses α = 2 tan(lr/2)/‖A‖₂, so that the largest rotation angle of an exact step is lr radians
    (to the accuracy of `stiefel.spectral_norm_skew`); a zero gradient moves nothing. `paper` steps along W = ½A, the
    projected gradient under the Euclidean metric, by min(lr, 2q/(‖W‖ + ε)) with q = 0.5 and ε = 1e-8. The paper leaves
    the norm open; here it is the largest absolute row sum, which is never below ‖W‖₂, so the fixed point contracts.

    Momentum M ← momentum · M + A is kept in the Lie algebra: the tangent vector M R is carried to the next rotation R'
    as M R' (right translation, an isometric transport), so M stays skew and needs no projection. The paper instead
    projects W R onto the tangent space at R', which agrees to first order in the step.

    State of a parameter: `step` (int) counts its updates; `momentum_buffer`, of its shape and dtype, if momentum > 0.

    Args:
        params: rotations, (n, n), or (blocks, n, n) for block-diagonal ones, float32 or float64, orthogonal; or groups,
            or named ones, as in torch.optim.
        lr: see `CayleySGDOptions`, as are the options below.
        momentum: in [0, 1).
        step_rule: a `StepRule` or its name.
        solver: a `Solver` or its name.
        fixed_point_iterations: at least 1.
        retract_every: each rotation is replaced by its QR factor after every so many of its steps; 0 for never.

    Raises:
        ValueError: an option, or a parameter, that cannot be used, such as one that is not orthogonal (where its values
            are here: not on the meta device, no DTensor); in `step`, a learning rate out of range or a sparse gradient.
        RuntimeError: in `step`, the exact solver found what is no solution; that batch has not moved then (on an
            accelerator the error comes later, and nothing can be read from the device any more).

    Source: Li, Li and Todorovic, "Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform",
    ICLR 2020, Algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        momentum: float = CayleySGDOptions.momentum,
        step_rule: StepRule | str = CayleySGDOptions.step_rule,
        solver: Solver | str = CayleySGDOptions.solver,
        fixed_point_iterations: int = CayleySGDOptions.fixed_point_iterations,
        retract_every: int = CayleySGDOptions.retract_every,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "step_rule": step_rule,
            "solver": solver,
            "fixed_point_iterations": fixed_point_iterations,
            "retract_every": retract_every,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of rotations, with its own options where it names them.

        Raises:
            ValueError: an option, or a parameter, that cannot be used, such as one that is not orthogonal; the group is
                not added then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _options(group).validate("CayleySGD")
            names = group.get("param_names", [f"params[{index}]" for index in range(len(group["params"]))])
            for name, parameter in zip(names, group["params"], strict=True):
                _check_parameter(parameter, name=name)
            _check_orthogonal(dict(zip(names, group["params"], strict=True)))
        except ValueError:
            self.param_groups.pop()
            raise
        # Plain strings, so that a state dict loads with `weights_only=True`.
        group |= {name: value.value for name, value in group.items() if isinstance(value, Enum)}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every rotation that has a gradient.

        Args:
            closure: recomputes the loss and its gradients, and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a learning rate out of range, or a sparse gradient.
            RuntimeError: a solve went wrong.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = _options(group)
            options.validate_lr("CayleySGD", allow_zero=True)
            for batch in self._batches(group["params"]):
                self._move(batch, options)
        return loss

    @property
    def uses_gradient_length(self) -> bool:
        """Whether a longer gradient makes another step, in any group."""
        return any(_options(group).uses_gradient_length for group in self.param_groups)

    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        """Return what is kept of a rotation before its first step: see the class."""
        group = next(group for group in self.param_groups if any(rotation is held for held in group["params"]))
        return {"step": 0} | ({"momentum_buffer": torch.zeros_like(rotation)} if group["momentum"] > 0.0 else {})

    @torch.no_grad()
    def project(self) -> None:
        """Replace every rotation by the orthogonal matrix nearest to it, once, at the end of training."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(stiefel.polar_projection(parameter))

    def _batches(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Gather the parameters that can be stepped as one: equal in size, dtype, device and number of steps."""
        batches: dict[tuple[object, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            _check_gradient(parameter.grad)
            steps = self.state[parameter].setdefault("step", 0)
            size = parameter.shape[-1]
            batches.setdefault((size, parameter.dtype, parameter.device, steps), []).append(parameter)
        return list(batches.values())

    @torch.no_grad()
    def _move(self, batch: list[Tensor], options: CayleySGDOptions) -> None:
        rotations = _stacked(batch)
        gradients = _stacked([parameter.grad for parameter in batch if parameter.grad is not None])
        generator = stiefel.skew_generator(rotations, gradients)
        if options.momentum > 0.0:
            generator = self._accumulate(batch, generator, momentum=options.momentum)
        moved = _cayley(generator * _step_size(generator, options), rotations, options)
        if self._count(batch, options.retract_every):
            moved = stiefel.qr_retraction(moved)
        _write(batch, moved)

    def _accumulate(self, batch: list[Tensor], generator: Tensor, *, momentum: float) -> Tensor:
        """Add the generator to the momentum buffers and return them as one batch."""
        for parameter in batch:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in batch]
        accumulated = momentum * _stacked(buffers) + generator
        _write(buffers, accumulated)
        return accumulated

    def _count(self, batch: list[Tensor], retract_every: int) -> bool:
        """Count one step of each parameter, and say whether it is one after which they are retracted."""
        for parameter in batch:
            self.state[parameter]["step"] += 1
        steps: int = self.state[batch[0]]["step"]
        return retract_every > 0 and steps % retract_every == 0


def _stacked(matrices: list[Tensor]) -> Tensor:
    """Return tensors (..., n, n) of one n as one batch (blocks of all, n, n); a single one is not copied."""
    if len(matrices) == 1:
        return matrices[0].reshape(-1, *matrices[0].shape[-2:])
    return torch.cat([matrix.reshape(-1, *matrix.shape[-2:]) for matrix in matrices])


def _write(matrices: list[Tensor], batch: Tensor) -> None:
    """Copy a batch back into the tensors that `_stacked` made it from."""
    pieces = torch.split(batch, [matrix.shape[:-2].numel() for matrix in matrices])
    torch._foreach_copy_(matrices, [piece.view_as(matrix) for piece, matrix in zip(pieces, matrices, strict=True)])


def _options(group: dict[str, Any]) -> CayleySGDOptions:
    options = {name: group[name] for name in OPTION_NAMES}
    options["step_rule"] = _choice(options["step_rule"], StepRule)
    options["solver"] = _choice(options["solver"], Solver)
    return CayleySGDOptions(**options)


def _choice(value: object, choices: type[Choice]) -> object:
    """Return the choice of that name, or the value as it is, for validation to refuse."""
    return choices.__members__.get(value, value) if isinstance(value, str) else value


def _step_size(generator: Tensor, options: CayleySGDOptions) -> Tensor:
    """Return the factor (batch, 1, 1) by which each generator (batch, n, n) is multiplied before the Cayley step."""
    if options.step_rule is StepRule.angle:
        size = stiefel.angle_step_size(generator, angle=options.lr)
    else:
        # The paper's W is half the generator.
        size = 0.5 * stiefel.contraction_step_size(
            0.5 * generator, lr=options.lr, contraction=CONTRACTION, epsilon=EPSILON
        )
    return size[..., None, None]


def _cayley(generator: Tensor, rotation: Tensor, options: CayleySGDOptions) -> Tensor:
    if options.solver is Solver.exact:
        return stiefel.cayley_exact(generator, rotation, length=_length(options))
    return stiefel.cayley_fixed_point(generator, rotation, iterations=options.fixed_point_iterations)


def _length(options: CayleySGDOptions) -> float:
    """Return a bound on ‖½αA‖₂ of a step, known before the step and so the same on every rank."""
    return stiefel.angle_step_length(options.lr) if options.step_rule is StepRule.angle else CONTRACTION


def _check_parameter(parameter: Tensor, *, name: str) -> None:
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} has dtype {parameter.dtype}: only torch.float32 and torch.float64 keep rotations exact"
        )
    square = parameter.ndim in (2, 3) and parameter.shape[-2] == parameter.shape[-1]
    if parameter.layout is not torch.strided or not square:
        shape, layout = tuple(parameter.shape), parameter.layout
        raise ValueError(
            f"{name} has shape {shape}, layout {layout}: "
            f"a rotation is a dense square matrix, or a stack of such blocks; leave it out"
        )


@torch.no_grad()
def _check_orthogonal(parameters: dict[str, Tensor]) -> None:
    """Refuse matrices that are no rotations, once, in one product for all of a size.

    Raises:
        ValueError: the first of them is named.
    """
    batches: dict[tuple[object, ...], dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.numel() and not parameter.is_meta and not isinstance(parameter, DTensor):
            size = (parameter.shape[-1], parameter.dtype, parameter.device)
            batches.setdefault(size, {})[name] = parameter
    for batch in batches.values():
        for name, error in zip(batch, _orthogonality_errors([*batch.values()]), strict=True):
            if not error <= ORTHOGONAL:
                raise ValueError(
                    f"{name} is not orthogonal (max|R Rᵀ − I| = {error:.1e}, at most {ORTHOGONAL:.0e}): "
                    f"start from rotexp.random_orthogonal, or project it by "
                    f"rotexp.orthogonal.stiefel.polar_projection"
                )


def _orthogonality_errors(matrices: list[Tensor]) -> list[float]:
    """Return max|R Rᵀ − I| of every tensor (..., n, n) of one n, in their own precision."""
    rotations = _stacked(matrices)
    products = rotations @ rotations.mT
    products.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    errors = torch.split(products.abs().amax(dim=(-2, -1)), [matrix.shape[:-2].numel() for matrix in matrices])
    worst: list[float] = torch.stack([error.amax() for error in errors]).tolist()
    return worst


def _check_gradient(gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise ValueError(f"a gradient has layout {gradient.layout}: only dense ones (torch.strided) can be used")
