"""Call what a configuration's `_target_` names, after checking it against an allow-list."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from rotexp.errors.requirements import require

ALLOWED_TARGETS = ("rotexp.optim.", "rotexp.training.objectives.")
"""Prefixes of what `_target_` may name."""


def build(component: Any, *arguments: Any) -> Any:
    """Call what `component._target_` names with `arguments` and the component's other fields.

    Raises:
        ValueError: the target is not allowed; nothing was imported or called then.
    """
    module, _, name = check_target(component).rpartition(".")
    factory = getattr(importlib.import_module(module), name)
    options = {option.name: getattr(component, option.name) for option in dataclasses.fields(component)}
    return factory(*arguments, **{key: value for key, value in options.items() if key not in ("name", "_target_")})


def check_target(component: Any, *, key: str = "_target_") -> str:
    """Return the component's `_target_` if it names a class that a module of the allow-list itself defines.

    The module's text is read, not run: what it imports cannot be reached through it.

    Raises:
        ValueError: it does not.
    """
    target = str(getattr(component, "_target_", None))
    allowed = f"a class of {' or '.join(prefix.rstrip('.') for prefix in ALLOWED_TARGETS)}"
    module, _, name = target.rpartition(".")
    inside = target.startswith(ALLOWED_TARGETS) and module.count(".") == 2
    require(inside and name in _classes(module), key, target, allowed, "leave it as the option sets it")
    return target


def _classes(module: str) -> set[str]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return set()
    return {node.name for node in ast.parse(Path(spec.origin).read_bytes()).body if isinstance(node, ast.ClassDef)}
