"""Import what a run needs without the collector of cycles, which would go through all of it again and again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HEAVY = "torch"
"""Where it is imported already, most of what there is to import is there."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector while the block imports, and let it pass over what was imported for good.

    Modules live as long as the process: looking through the half a million objects of torch and transformers each time
    that they have grown by a quarter takes a quarter of the time of importing them. What a process has that imported
    them before stays as it is.
    """
    if HEAVY in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
