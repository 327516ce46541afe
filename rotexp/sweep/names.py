"""Names of jobs: a pure function of what a job's axes are set to, fit for folders, shells and W&B."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rotexp.tracking.short_names import MARK, marked, plain_text

LONGEST = 100
"""Characters of a name; a longer one is cut, and ends in a digest of the whole."""

SEPARATOR = "__"


def job_name(axes: Mapping[str, str]) -> str:
    """Return a name of letters, digits, `.`, `-` and `_`; other axes, or other values, give another name.

    Args:
        axes: the value of each key that the sweep varies, as on the command line.
    """
    name = SEPARATOR.join(f"{_clean(key)}-{_clean(value)}" for key, value in axes.items()) or "single"
    if len(name) <= LONGEST and name[0] not in ".-":
        return name
    return marked(name[: LONGEST - MARK].lstrip(".-"), by=repr(list(axes.items())))


def axes_of(overrides: Iterable[str], keys: Iterable[str]) -> dict[str, str]:
    """Return the values that one job's overrides give to the varied keys."""
    given = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides)}
    return {key: given[key] for key in dict.fromkeys(key.lstrip("+") for key in keys) if key in given}


def _clean(text: str) -> str:
    """Replace what does not belong into a name; a digest keeps apart what becomes alike."""
    plain = text.strip("'\"")
    clean = plain_text(plain, gap="-")
    return clean if clean == plain and clean and SEPARATOR not in clean else marked(clean.strip("-"), by=plain)
