"""What the checks of all parts share: a rule that is broken is an AssertionError of one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rotexp.config.targets import members


@contextmanager
def rule(name: str) -> Iterator[None]:
    """Turn whatever the block raises, but for broken rules, into the rule that it broke."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise AssertionError(f"{name}: raised {type(error).__name__}: {reason}") from error


def check_members(part: Any, protocol: type[Any]) -> None:
    """Refuse a part that lacks what a Protocol asks for."""
    for name in members(protocol):
        assert hasattr(part, name), f"{name}: is missing, and {protocol.__module__}.{protocol.__name__} asks for it"


def disturb(seed: int) -> None:
    """Set torch's global generator, which ranks do not share: what draws from it differs from call to call."""
    torch.manual_seed(seed)
