"""rotexp trains the rotations that let a large language model be quantized, sharded and measured.

What is listed here is the library: `rotexp.run(["train.steps=20"])` does what `python -m rotexp.train` does,
`rotexp.place(model)` puts rotations and quantizers into a model of your own, and the optimizer, the guard of FSDP2's
unshards and the coordinator of replicas serve a training loop of your own. Nothing is imported before it is used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotexp.config.schema import Config
    from rotexp.face.configs import load_config
    from rotexp.face.finished import Evaluation, evaluate, export
    from rotexp.face.own_model import merge, place, prepare
    from rotexp.face.result import RunResult
    from rotexp.face.run import RunError, run
    from rotexp.optim.cayley_sgd import CayleySGD
    from rotexp.orthogonal.hadamard import hadamard, random_hadamard, random_orthogonal
    from rotexp.quant.options import QuantConfig
    from rotexp.quant.spec import QuantSpec
    from rotexp.rotation.bank import RotationBank
    from rotexp.rotation.model import RotatedModel
    from rotexp.rotation.options import RotationConfig
    from rotexp.sharding.communication import Communication
    from rotexp.sharding.guard import UnshardGuard, guarded
    from rotexp.training.coordinator import Coordinator

__all__ = [
    "CayleySGD",
    "Communication",
    "Config",
    "Coordinator",
    "Evaluation",
    "QuantConfig",
    "QuantSpec",
    "RotatedModel",
    "RotationBank",
    "RotationConfig",
    "RunError",
    "RunResult",
    "UnshardGuard",
    "evaluate",
    "export",
    "guarded",
    "hadamard",
    "load_config",
    "merge",
    "place",
    "prepare",
    "random_hadamard",
    "random_orthogonal",
    "run",
]

_MODULES = {
    "rotexp.config.schema": ("Config",),
    "rotexp.face.configs": ("load_config",),
    "rotexp.face.finished": ("Evaluation", "evaluate", "export"),
    "rotexp.face.own_model": ("merge", "place", "prepare"),
    "rotexp.face.result": ("RunResult",),
    "rotexp.face.run": ("RunError", "run"),
    "rotexp.optim.cayley_sgd": ("CayleySGD",),
    "rotexp.orthogonal.hadamard": ("hadamard", "random_hadamard", "random_orthogonal"),
    "rotexp.quant.options": ("QuantConfig",),
    "rotexp.quant.spec": ("QuantSpec",),
    "rotexp.rotation.bank": ("RotationBank",),
    "rotexp.rotation.model": ("RotatedModel",),
    "rotexp.rotation.options": ("RotationConfig",),
    "rotexp.sharding.communication": ("Communication",),
    "rotexp.sharding.guard": ("UnshardGuard", "guarded"),
    "rotexp.training.coordinator": ("Coordinator",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


class _Face(ModuleType):
    """The package: two names of it are commands as well, `rotexp.evaluate` and `rotexp.export`.

    Python makes a module an attribute of its package when it is imported, which would hide the function; the command is
    found by `from rotexp.evaluate import …` and `python -m` all the same.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rotexp' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _Face
