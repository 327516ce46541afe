"""The options of data: where texts come from, how they are cut, how many blocks make a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

from rotexp.config.components import Pluggable
from rotexp.errors.requirements import MISSING, require


class DataSource(Enum):
    """Where calibration and evaluation text come from."""

    builtin = "builtin"
    wikitext2 = "wikitext2"
    text = "text"


KEYS_OF_SOURCE = {
    DataSource.wikitext2: ("path", "revision"),
    DataSource.text: ("calibration", "evaluation", "field"),
}
"""Options of `data` that only one source reads, and which are null where another is chosen."""


@dataclass(frozen=True)
class DataConfig(Pluggable):
    """Text and how it is cut; lengths in tokens, batch in blocks over all ranks.

    Attributes:
        name: what tables and W&B call the option that was chosen.
        source: which of rotexp's own (None: that of your own which `_target_` names).
        path, revision: of WikiText-2: the hub's repository or a folder, and its branch, tag or commit.
        calibration, evaluation: of your own texts: a file, a folder or a pattern such as `texts/*.txt`.
        field: which field of JSON Lines or Parquet holds the text; of plain text there is none.
        max_characters: how far each text is read (None: to its end); memory and time grow with it.
        sequence_length: of a block that is trained on, in tokens.
        global_batch_size: blocks a step over all ranks, however many those are.
    """

    HANDED_ON: ClassVar[tuple[str, ...]] = tuple(key for keys in KEYS_OF_SOURCE.values() for key in keys)

    name: str = MISSING
    source: DataSource | None = MISSING
    path: str | None = None
    revision: str | None = None
    calibration: str | None = None
    evaluation: str | None = None
    field: str | None = None
    max_characters: int | None = 100_000_000
    sequence_length: int = 256
    global_batch_size: int = 8

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        if self.target is None and self.source is None:
            choices = ", ".join(source.name for source in DataSource)
            raise ValueError(
                f"data.source=null: must be one of {choices}, or data._target_ a class; set one of the two"
            )
        if self.target is not None and self.source is not None:
            raise ValueError(f"data.source={self.source.name}: must be null where data._target_ reads; leave it out")
        for source, keys in KEYS_OF_SOURCE.items():
            for key in keys if source is not self.source else ():
                allowed = f"null for data={self.name}, which does not read it"
                require(
                    getattr(self, key) is None, f"data.{key}", getattr(self, key), allowed, f"set data={source.name}"
                )
        if self.source is DataSource.text:
            for name in ("calibration", "evaluation"):
                require(bool(getattr(self, name)), f"data.{name}", None, "a text file", f"set data.{name}=FILE")
            same = Path(str(self.calibration)).resolve() == Path(str(self.evaluation)).resolve()
            require(
                not same,
                "data.evaluation",
                self.evaluation,
                "another file than data.calibration",
                "held-out figures need text that was not trained on",
            )
            require(self.field != "", "data.field", self.field, "a field's name or null", "null is plain text")
        limit = self.max_characters
        require(limit is None or limit >= 1, "data.max_characters", limit, "at least 1 or null", "null reads all")
        require(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2", "lengthen it")
        require(
            self.global_batch_size >= 1, "data.global_batch_size", self.global_batch_size, "at least 1", "enlarge it"
        )
