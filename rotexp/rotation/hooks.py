"""Rotate what goes into or comes out of a module of any class, which stays as it is: embeddings and routers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rotexp.rotation.bank import Rotation
from rotexp.rotation.mode import Mode


class RotatedOutput:
    """Rotates the output of an embedding by a hook; a merge rotates its `weight` (rows, hidden)."""

    def __init__(self, module: nn.Module, *, mode: Mode, rotation: Rotation) -> None:
        self.module = module
        self.mode = mode
        self.rotation: Rotation | None = rotation
        module.register_forward_hook(self)

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Return the output (..., hidden), rotated if the mode says so."""
        return self.rotation.rotate(output) if self.mode.rotate and self.rotation is not None else output

    @property
    def sides(self) -> tuple[str, str]:
        """What rotates input and output, by name; empty where nothing does."""
        return "", self.rotation.name if self.rotation else ""

    def merged(self) -> dict[str, Tensor]:
        """Return the weight with the rotation baked in (the whole parameter must be gathered)."""
        return _merged(self.module, self.rotation)

    def release(self) -> None:
        """Let go of the rotation's handle."""
        self.rotation = None


class RotatedInput:
    """Rotates the input of an unquantized reader back by a hook; a merge rotates its `weight` (outputs, hidden)."""

    def __init__(self, module: nn.Module, *, mode: Mode, rotation: Rotation) -> None:
        self.module = module
        self.mode = mode
        self.rotation: Rotation | None = rotation
        module.register_forward_pre_hook(self)

    def __call__(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the inputs, the first (..., hidden) rotated back if the mode says so."""
        if not self.mode.rotate or self.rotation is None:
            return inputs
        return (self.rotation.unrotate(inputs[0]), *inputs[1:])

    @property
    def sides(self) -> tuple[str, str]:
        """What rotates input and output, by name; empty where nothing does."""
        return self.rotation.name if self.rotation else "", ""

    def merged(self) -> dict[str, Tensor]:
        """Return the weight with the rotation baked in (the whole parameter must be gathered)."""
        return _merged(self.module, self.rotation)

    def release(self) -> None:
        """Let go of the rotation's handle."""
        self.rotation = None


def _merged(module: nn.Module, rotation: Rotation | None) -> dict[str, Tensor]:
    weight = module.get_parameter("weight")
    return {"weight": weight if rotation is None else rotation.rotate(weight)}
