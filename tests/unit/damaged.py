"""What a crash, a full disk or another program leaves where a file of JSON should be, and what is said of it."""

from typing import Any

import pytest

RUN_FACTS: dict[str, Any] = {
    "base": {"model": "tiny", "digest": "d"},
    "config": {"train": {"params": "rotations"}},
    "evaluation": {"protocol": {}},
    "phases": {},
    "state": {"seconds": 3.0},
    "tracker": {"run_id": None},
}
"""What a whole checkpoint says of its run, at least."""

CONTENTS = {
    "NULs": (b"\0" * 200, "it holds NUL bytes, as a crash leaves them"),
    "NULs at the end": (b'{"status": "done"}' + b"\0" * 9, "it holds NUL bytes, as a crash leaves them"),
    "truncated": (b'{"status": "do', "Unterminated string starting at: line 1 column 12 (char 11)"),
    "empty": (b"", "it is empty"),
    "blank": (b" \n", "it is empty"),
    "list": (b"[]", "it holds no mapping"),
    "null": (b"null", "it holds no mapping"),
    "text": (b'"x"', "it holds no mapping"),
    "number": (b"3", "it holds no mapping"),
    "latin": ('{"error": "é"}'.encode("latin-1"), "byte 11 is no UTF-8"),
    "UTF-16": ('{"status": "done"}'.encode("utf-16"), "byte 0 is no UTF-8"),
    "deep": (b"[" * 100_000, "it is nested too deeply"),
}

damaged = pytest.mark.parametrize(("content", "reason"), CONTENTS.values(), ids=CONTENTS)
