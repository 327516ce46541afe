"""Texts made fit for names: without special characters, and cut where they are too long, yet kept apart by a digest."""

from __future__ import annotations

import hashlib
import re

MARK = 9
"""Characters by which `marked` makes a text longer."""


def plain_text(text: str, *, gap: str) -> str:
    """Return the text with every run of other characters than letters, digits, `.`, `_` and `-` as one `gap`."""
    return re.sub(r"[^A-Za-z0-9._-]+", gap, text)


def marked(text: str, *, by: str) -> str:
    """Return the text with a `-` and eight hex digits of the SHA-256 of another, which it stands for."""
    return f"{text}-{hashlib.sha256(by.encode()).hexdigest()[:8]}"


def shortened(text: str, longest: int) -> str:
    """Return a text of at most that many characters: a longer one is cut, and marked by the whole."""
    return text if len(text) <= longest else marked(text[: longest - MARK], by=text)
