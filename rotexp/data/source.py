"""Where a run's two texts come from, rotexp's own sources or the user's."""

from __future__ import annotations

from typing import Protocol

from rotexp.data.corpora import Corpus


class TextSource(Protocol):
    """Reads a run's two texts; made of its options. `rotexp.testing.check_data_source` tries one.

    Of what it reads `data.max_characters` are used; digests of both texts are recorded, the two may not be the same,
    and a warning says how much of the evaluation text stands in the calibration text too.
    """

    def read(self) -> Corpus:
        """Return the texts, the same at every call: `rotexp.data.corpora.Corpus(calibration=…, evaluation=…)`."""
        ...


def fault_of_corpus(read: object) -> str:
    """Return in words why what a source read is no pair of texts; empty if it is one."""
    if not isinstance(read, Corpus):
        return f"read() returned a {type(read).__name__} and not a rotexp.data.corpora.Corpus"
    for name in ("calibration", "evaluation"):
        text = getattr(read, name)
        if not isinstance(text, str) or not text.strip():
            found = "empty" if isinstance(text, str) else f"a {type(text).__name__}"
            return f"the {name} text that read() returned is {found}"
    return ""
