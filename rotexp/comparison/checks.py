"""What became of a recipe's figures in a run of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """A recipe beside one run of it.

    Attributes:
        recipe, run: their names; no run where none of the recipe was found.
        equal, within, moved: how many figures have the recipe's bits, others within its tolerance, or neither.
        faults: in a line each what does not hold.
    """

    recipe: str
    run: str | None = None
    equal: int = 0
    within: int = 0
    moved: int = 0
    faults: Sequence[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """What that comes to, in words."""
        if self.run is None:
            return "no run"
        return "does not hold" if self.faults else "holds"

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, for the page."""
        return asdict(self) | {"verdict": self.verdict}
