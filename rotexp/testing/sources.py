"""Check that a data source reads two texts, the same at every call."""

from __future__ import annotations

from typing import Any

from rotexp.data.corpora import Corpus
from rotexp.data.source import TextSource, fault_of_corpus
from rotexp.testing.rules import check_members, rule


def check_data_source(cls: type[Any], **options: Any) -> None:
    """Let a source read its texts twice.

    Args:
        cls: called as `cls(**options)`, see `rotexp.data.source.TextSource`.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    first, second = _read(cls, options), _read(cls, options)
    same = (first.calibration, first.evaluation) == (second.calibration, second.evaluation)
    assert same, "read: gives other texts at the next call; a run is repeated on the same"
    differ = first.calibration_spelling != first.evaluation_spelling
    assert differ, "read: gives the same text twice; held-out figures need text that was not trained on"


def _read(cls: type[Any], options: dict[str, Any]) -> Corpus:
    with rule("cls(**options)"):
        source: TextSource = cls(**options)
    check_members(source, TextSource)
    with rule("read"):
        corpus = source.read()
    fault = fault_of_corpus(corpus)
    assert not fault, f"read: {fault}"
    return corpus
