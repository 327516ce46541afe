"""Rotate what goes into or comes out of a module of any class, which stays as it is: embeddings and routers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rotexp.rotation.bank import Rotation
from rotexp.rotation.mode import Mode


class _HookedRotation:
    """A rotation at one side of a module, which a merge bakes into the columns of its `weight` (rows, hidden)."""

    def __init__(self, module: nn.Module, *, mode: Mode, rotation: Rotation) -> None:
        self.module = module
        self.mode = mode
        self.rotation: Rotation | None = rotation

    def merged(self) -> dict[str, Tensor]:
        """Return the weight with the rotation baked in (the whole parameter must be gathered)."""
        weight = self.module.get_parameter("weight")
        return {"weight": weight if self.rotation is None else self.rotation.rotate(weight)}

    def release(self) -> None:
        """Let go of the rotation's handle."""
        self.rotation = None


class RotatedOutput(_HookedRotation):
    """Rotates the output of an embedding by a hook."""

    def __init__(self, module: nn.Module, *, mode: Mode, rotation: Rotation) -> None:
        super().__init__(module, mode=mode, rotation=rotation)
        module.register_forward_hook(self)

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Return the output (..., hidden), rotated while the rotation turns what flows."""
        return self.rotation.rotate(output) if self.mode.turns(self.rotation) else output

    @property
    def sides(self) -> tuple[str, str]:
        """What rotates input and output, by name; empty where nothing does."""
        return "", self.rotation.name if self.rotation else ""


class RotatedInput(_HookedRotation):
    """Rotates the input of an unquantized reader back by a hook."""

    def __init__(self, module: nn.Module, *, mode: Mode, rotation: Rotation) -> None:
        super().__init__(module, mode=mode, rotation=rotation)
        module.register_forward_pre_hook(self)

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the inputs, the first (..., hidden) rotated back while the rotation turns what flows."""
        return (self.rotation.unrotate(inputs[0]), *inputs[1:]) if self.mode.turns(self.rotation) else inputs

    @property
    def sides(self) -> tuple[str, str]:
        """What rotates input and output, by name; empty where nothing does."""
        return self.rotation.name if self.rotation else "", ""
