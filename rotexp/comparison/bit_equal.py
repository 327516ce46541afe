"""Which runs found the same, bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, product
from string import ascii_uppercase

from rotexp.comparison.computing import deciding, is_exact
from rotexp.comparison.figures import steps
from rotexp.comparison.reading import dig
from rotexp.comparison.runs import Run
from rotexp.runfolder.bits import rotations_digest
from rotexp.runfolder.layout import ROTATIONS_FILE

MEANING = "runs of one letter have the same rotations, losses and held-out figures, bit for bit"

SPREAD = ("cores", "threads")
"""What a summary says of a machine that changes no bit under `numerics=exact` where no number of threads is chosen."""


def findings(run: Run) -> str | None:
    """Return a text that runs share exactly if they found the same bits; None where one does not say what it found.

    That is its rotations, the loss of every step and every held-out figure; of one that trained nothing the last alone.
    """
    evaluation = dig(run.summary, "evaluation")
    if run.status != "done" or not isinstance(evaluation, dict):
        return None
    rows = {row: figures for row, figures in evaluation.items() if row != "protocol"}
    if not rows:
        return None
    if not steps(run):
        return json.dumps(rows, sort_keys=True)
    digest = _digest(run)
    return digest and json.dumps([digest, run.points.get("train/loss"), rows], sort_keys=True)


def _digest(run: Run) -> str | None:
    """Return the digest of a run's rotations: the summary's, or of one that is older that of its file."""
    if said := dig(run.summary, "rotations_digest"):
        return str(said)
    try:
        return rotations_digest(run.folder / ROTATIONS_FILE)
    except ValueError:
        return None


def letters(found: Sequence[str | None]) -> list[str]:
    """Return a letter for each of some findings, the same for those that are equal; none for one that is alone."""
    shared = [text for text, runs in Counter(found).items() if text is not None and runs > 1]
    named = dict(zip(shared, _letters(), strict=False))
    return [named.get(text or "", "") for text in found]


def _letters() -> Iterator[str]:
    """Yield A to Z, then AA and so on."""
    for length in count(1):
        yield from map("".join, product(ascii_uppercase, repeat=length))


def _promised(run: Run) -> str:
    """Return a text that runs share to which `numerics=exact` promises the same bits, as far as they say."""
    machine = run.summary.get("machine")
    kind = {key: fact for key, fact in machine.items() if key not in SPREAD} if isinstance(machine, dict) else {}
    facts = [deciding(run.config, exact=True), run.config.get("launch.threads"), run.summary.get("versions"), kind]
    return json.dumps(facts, sort_keys=True)


def parted(runs: Sequence[Run], found: Sequence[str | None]) -> list[str]:
    """Say which runs broke the promise of `numerics=exact`: they computed the same alike, and found other bits."""
    alike: dict[str, dict[str, str]] = {}
    for run, text in zip(runs, found, strict=True):
        if text is not None and is_exact(run.config):
            alike.setdefault(_promised(run), {}).setdefault(text, run.name)
    return [
        f"{' and '.join(names.values())} computed the same under numerics=exact, and their bits differ: "
        f"report it, unless their machines do"
        for names in alike.values()
        if len(names) > 1
    ]
