"""What a request requires: one line where it is not met."""

from __future__ import annotations

from typing import Any

MISSING: Any = "???"
"""What OmegaConf takes for a value that must be given; written out, so that the library does not need OmegaConf."""


def require(condition: bool, key: str, value: object, allowed: str, remedy: str) -> None:
    """Raise ValueError in one line (key, value, what is allowed, what to do) unless the condition holds."""
    if not condition:
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        raise ValueError(f"{key}={shown}: must be {allowed}; {remedy}")
