"""What an optimizer of rotations is, rotexp's own or the user's."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from torch import Tensor


class ManifoldOptimizer(Protocol):
    """Moves orthogonal matrices by their gradients; made as `cls(rotations, **options)` of a list of parameters.

    A rotation is (n, n), or (blocks, n, n), float32 or float64, whole and equal on every rank, and so is its gradient:
    a step that draws no random numbers and asks no other rank keeps it so. `rotexp.testing.check_optimizer` tries one.
    It may have `uses_gradient_length`, False where a longer gradient makes no other step, so that
    `train.max_grad_norm` leaves rotations' gradients alone (taken for True where it is missing).

    Attributes:
        param_groups: as those of `torch.optim.Optimizer`; `lr` of each is set by schedulers, and read in every step.
        state: of each rotation what its later steps depend on, tensors and numbers, as `initial_state` says.
    """

    param_groups: list[dict[str, Any]]
    state: MutableMapping[Any, Any]

    def step(self) -> Any:
        """Move every rotation that has a gradient along the manifold; one whose group has `lr` 0 stays, to rounding."""
        ...

    def zero_grad(self) -> None:
        """Forget every gradient."""
        ...

    def project(self) -> None:
        """Replace every rotation by an orthogonal matrix near it, exact to rounding; called once, after training."""
        ...

    def initial_state(self, rotation: Tensor) -> dict[str, Any]:
        """Return what `state` holds of a rotation before its first step: tensors, and int, float or bool.

        It is there from the start, so that memory is known beforehand and a checkpoint can be read into it; `step` goes
        on from it, under the same keys, shapes and dtypes. The rotation may be on the meta device.
        """
        ...


def state_bytes(optimizer: ManifoldOptimizer, rotation: Tensor) -> int:
    """Return the bytes of the tensors that an optimizer keeps of a rotation."""
    tensors = (value for value in optimizer.initial_state(rotation).values() if isinstance(value, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
