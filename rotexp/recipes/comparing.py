"""Compare a run that was made again with its recipe: what it ran on, and every figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rotexp.recipes.figures import Value, difference
from rotexp.recipes.recipe import Recipe

VERSIONS = ("rotexp", "torch", "transformers", "python")
"""What may change bits."""
KIND = ("cpu", "instructions", "integer_units", "device")
"""What of a machine may change bits under `numerics=exact`."""
ROTATIONS, WEIGHTS = "rotations", "weights of the model"


class Verdict(Enum):
    """What is said of a figure."""

    equal = "equal bits"
    within = "within tolerance"
    differs = "differs"


@dataclass(frozen=True)
class Compared:
    """A figure of a recipe beside that of the run that was made now (None: it has none)."""

    name: str
    before: Value
    now: Value | None
    tolerance: float | None = None

    @property
    def difference(self) -> float:
        """By how much they differ, at the worst of their steps; infinite where they do not compare."""
        return float("inf") if self.now is None else difference(self.before, self.now)

    @property
    def verdict(self) -> Verdict:
        """Whether it holds."""
        if self.difference == 0:
            return Verdict.equal
        within = self.tolerance is not None and self.difference <= self.tolerance
        return Verdict.within if within else Verdict.differs


@dataclass(frozen=True)
class Comparison:
    """Every figure of a recipe compared, and whether equal bits are expected.

    Attributes:
        digests: of what has no tolerance, the weights that were read and the trained rotations: the recipe's and now.
        bits_expected: under `numerics=exact`, on the same kind of machine, versions and threads.
    """

    figures: Sequence[Compared]
    digests: Mapping[str, tuple[str, str]]
    bits_expected: bool

    def count(self, verdict: Verdict) -> int:
        """Return of how many figures that is said."""
        return sum(figure.verdict is verdict for figure in self.figures)

    @property
    def bits_equal(self) -> bool:
        """Whether every figure has the recipe's bits, and so have weights and rotations."""
        equal = all(before == now for before, now in self.digests.values())
        return equal and self.count(Verdict.equal) == len(self.figures)

    @property
    def same_weights(self) -> bool:
        """Whether the model is the recipe's, as far as the recipe says which that is."""
        before, now = self.digests.get(WEIGHTS, ("", ""))
        return before == now

    @property
    def holds(self) -> bool:
        """Whether the run is the recipe's: to the bit where that is expected, elsewhere within tolerances."""
        return self.bits_equal if self.bits_expected else self.same_weights and not self.count(Verdict.differs)


def compare(recipe: Recipe, now: Recipe, *, bits_expected: bool) -> Comparison:
    """Compare every figure of a recipe with those of the run that was made now."""
    found = now.values
    figures = [
        Compared(name, figure.value, found.get(name), figure.tolerance) for name, figure in recipe.figures.items()
    ]
    digests = {ROTATIONS: (recipe.rotations, now.rotations)}
    if recipe.model.get("digest"):
        digests[WEIGHTS] = (str(recipe.model["digest"]), str(now.model.get("digest")))
    return Comparison(figures, digests, bits_expected)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each of these facts that is not the same, with both; what is not known is said so."""
    for key in keys:
        if before.get(key) != now.get(key) or key not in before:
            yield key, str(before.get(key, "unknown")), str(now.get(key, "unknown"))
