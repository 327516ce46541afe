"""Writes the tables of README.md and of the pages from recipes/: `python docs/tables.py`."""

from __future__ import annotations

import re
from pathlib import Path

from rotexp.recipes.figures import ROW_FIGURES
from rotexp.recipes.recipe import Recipe, read_recipe
from rotexp.tracking.console import ROWS

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
PAGES = (ROOT / "README.md", ROOT / "docs" / "getting-started.md")
END = "<!-- end of recipe -->"
PLACE = re.compile(rf"<!-- recipe: (\w+) -->.*?{re.escape(END)}", re.DOTALL)
HEAD = ("model", "perplexity", "against float", "KL (nats)", "top-1 agreement")


def rewritten(page: str) -> str:
    """Return a page in which everything between marks is what the recipe that they name says.

    Raises:
        ValueError: there is no such recipe.
    """
    return PLACE.sub(lambda place: section(read_recipe(RECIPES / f"{place[1]}.yaml")), page)


def section(recipe: Recipe) -> str:
    """Return a recipe's table, as a run prints it, and where it comes from, between marks."""
    table = ["```", *lines(recipe), "```"]
    return "\n".join([f"<!-- recipe: {recipe.name} -->", *table, "", origin(recipe), END])


def lines(recipe: Recipe) -> list[str]:
    """Return the rows that were measured, aligned."""
    rows = [HEAD, *(row(recipe, name) for name in ROWS if f"evaluation.{name}.perplexity" in recipe.figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]) for cells in rows]


def row(recipe: Recipe, name: str) -> tuple[str, ...]:
    """Return the cells of a variant of the model."""
    held = recipe.values
    perplexity, kl, agreement = (held[f"evaluation.{name}.{figure}"] for figure in ROW_FIGURES)
    change = "" if name == "float" else f"{perplexity / held['evaluation.float.perplexity'] - 1:+.1%}"
    return ROWS[name], f"{perplexity:.2f}", change, f"{kl:.4f}", f"{agreement:.1%}"


def origin(recipe: Recipe) -> str:
    """Return when, of which commit, how, on what and on which text the figures were made, and which recipe says so."""
    made, needed = recipe.made, (f"{need}=PATH" for need in recipe.needs)
    command = " ".join(["python -m rotexp.train", *recipe.overrides, *needed])
    where = f"{made.machine['cores']} cores of {made.machine['cpu']}, torch {made.versions['torch']}"
    took = f"{made.seconds:.0f} s, text digest {recipe.texts['evaluation']}"
    return f"({made.date}, {made.commit}, `{command}` on {where}, {took}: `recipes/{recipe.name}.yaml`.)"


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
