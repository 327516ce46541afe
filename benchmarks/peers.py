"""Other people's software that does the same work, imported only when it is measured and never needed."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.facts import NOT_INSTALLED

BREVITAS = "brevitas w4a4"


class MissingPeerError(RuntimeError):
    """A peer is not installed, or does not work with the installed versions; the message is what tables show."""


def require(module: str) -> Any:
    """Import a peer's module.

    Raises:
        MissingPeerError: it is not installed, or its import fails.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        own = missing.partition(".")[0] == module.partition(".")[0]
        raise MissingPeerError(NOT_INSTALLED if own else f"{NOT_INSTALLED}: {missing}") from None
    except ImportError as error:
        raise MissingPeerError(f"cannot be imported: {error}") from None
