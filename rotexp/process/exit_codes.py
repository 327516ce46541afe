"""The exit codes of every command, and how a process of a rank ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

DONE, FAILED, WRONG_REQUEST = 0, 1, 2
SIGNALLED = 128
"""Exit codes above this say which signal ended a job."""
INTERRUPTED, TERMINATED = SIGNALLED + 2, SIGNALLED + 15
"""By SIGINT, as shells have it; by SIGTERM and the others that end a run in order."""


def leave_at_once(code: int) -> NoReturn:
    """End this process without finalizing its interpreter, which threads of its process group may still want."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
