"""One dashboard: the W&B workspace as its settings ask for it, saved or written to a file."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULTS = {"project": "rotexp", "entity": "", "name": "rotexp: comparison", "out": ""}
"""What can be set; without an entity that of whoever is logged in."""


def read_settings(texts: Sequence[str]) -> dict[str, str]:
    """Return the settings that `key=value` texts make of the defaults.

    Raises:
        ValueError: a text is of another form, or its key no setting.
    """
    settings = dict(DEFAULTS)
    for text in texts:
        key, equals, value = text.partition("=")
        if key not in DEFAULTS:
            near = difflib.get_close_matches(key, DEFAULTS, n=1)
            hint = f" (nearest: {near[0]})" if near else ""
            raise ValueError(f"{text}: no such key; choose one of {', '.join(DEFAULTS)}{hint}")
        if not equals or not (value or key == "entity"):
            raise ValueError(f"{text}: has no value; write {key}=…")
        settings[key] = value
    return settings


def dashboard(settings: dict[str, str]) -> int:
    """Build the workspace, write it if asked to, save it if somebody is logged in; return the exit code.

    Raises:
        ValueError: the file cannot be written, or it was not to be written and the workspace could not be saved.
    """
    from rotexp.tracking.workspace import build_workspace, save_workspace, workspace_json

    out = settings["out"]
    workspace = build_workspace(project=settings["project"], entity=settings["entity"], name=settings["name"])
    if out:
        try:
            Path(out).write_text(workspace_json(workspace), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"out={out}: cannot be written ({error.strerror}); choose another file") from None
        sys.stdout.write(f"wrote {out}\n")
    try:
        sys.stdout.write(f"saved {save_workspace(workspace)}\n")
    except ValueError as error:
        if not out:
            raise ValueError(f"{error}; or write it to a file by out=FILE") from None
        sys.stdout.write(f"{error}\n")
    return 0
