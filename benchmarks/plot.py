"""Draw the cost of a step over tokens and over model size, against the limit: `python -m benchmarks.plot step.json …`.

Written as SVG by hand: one plot does not justify a plotting library among the packages that everybody installs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import facts
from benchmarks.variants import LIMIT, RANDOM_SIZES, llama_shape

WIDTH, HEIGHT, MARGIN, LEGEND = 430, 300, 48, 64
COLORS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")

Lines = dict[str, list[tuple[float, float]]]
"""Points (x, ratio to the limit) by variant."""


def collect(rows: Sequence[dict[str, Any]], *, over: str) -> Lines:
    """Return the ratios over `tokens` of the whole batch, for the model most rows have, or over `parameters`.

    Over parameters the points are those at the number of tokens that most models were measured at.
    """
    known = [row for row in rows if "ratio" in row and row["model"] in RANDOM_SIZES]
    models, tokens = [row["model"] for row in known], [_tokens(row) for row in known]
    if over == "tokens":
        common = max(set(models), key=lambda model: (models.count(model), parameters(model)), default=None)
        kept = [row for row in known if row["model"] == common]
        places = [_tokens(row) for row in kept]
    else:
        breadth = {count: len({row["model"] for row in known if _tokens(row) == count}) for count in set(tokens)}
        kept = [
            row
            for row in known
            if _tokens(row) == max(breadth, key=lambda count: (breadth[count], count), default=None)
        ]
        places = [parameters(row["model"]) for row in kept]
    lines: Lines = {}
    for place, row in sorted(zip(places, kept, strict=True), key=lambda pair: pair[0]):
        lines.setdefault(row["variant"], []).append((float(place), row["ratio"]["median"]))
    return lines


def _tokens(row: dict[str, Any]) -> int:
    return int(row["batch"] * row["tokens"])


def parameters(model: str) -> int:
    """Return how many parameters a random Llama has, embedding and head apart."""
    from benchmarks.footprint import weight_bytes

    return weight_bytes(llama_shape(model), itemsize=1)


def panel(lines: Lines, *, title: str, unit: str, left: int) -> str:
    """Return one plot as SVG: a logarithmic axis of places, ratios from 0 up, one polyline a variant."""
    places = sorted({x for points in lines.values() for x, _ in points})
    highest = max((y for points in lines.values() for _, y in points), default=1.0) * 1.1
    low, high = math.log(places[0]), math.log(places[-1])

    def at(x: float, y: float) -> str:
        share = (math.log(x) - low) / (high - low) if high > low else 0.5
        across = left + MARGIN + share * (WIDTH - 2 * MARGIN)
        return f"{across:.1f},{HEIGHT - MARGIN - y / highest * (HEIGHT - 2 * MARGIN):.1f}"

    parts = [_text(left + WIDTH / 2, 20, title, anchor="middle", size=14)]
    for level in range(int(highest) + 1):
        start, end = at(places[0], level).split(","), at(places[-1], level).split(",")
        parts.append(f'<path d="M{left + MARGIN},{start[1]}H{left + WIDTH - MARGIN}" stroke="#dddddd"/>')
        parts.append(_text(left + MARGIN - 8, float(end[1]) + 4, f"{level}×", anchor="end"))
    for place in places:
        parts.append(_text(float(at(place, 0).split(",")[0]), HEIGHT - MARGIN + 18, human(place), anchor="middle"))
    parts.append(_text(left + WIDTH / 2, HEIGHT - 8, unit, anchor="middle"))
    for index, points in enumerate(lines.values()):
        route, color = [at(x, y) for x, y in points], COLORS[index % len(COLORS)]
        parts.append(f'<polyline points="{" ".join(route)}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in (spot.split(",") for spot in route)]
    return "\n".join(parts)


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Return both plots, with one legend, as SVG.

    Raises:
        ValueError: no row has a ratio.
    """
    over_tokens, over_size = collect(rows, over="tokens"), collect(rows, over="parameters")
    if not over_tokens:
        raise ValueError("no measured row of a random Llama; run benchmarks.step first")
    names = list(dict.fromkeys([*over_tokens, *over_size]))
    ordered = [{name: lines.get(name, []) for name in names} for lines in (over_tokens, over_size)]
    parts = [
        panel(ordered[0], title="Step over limit, by tokens", unit="tokens of a step", left=0),
        panel(ordered[1], title="Step over limit, by model size", unit="parameters", left=WIDTH),
    ]
    for index, name in enumerate(names):
        x, y = MARGIN + (index % 3) * 270, HEIGHT + 20 + (index // 3) * 20
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{COLORS[index % len(COLORS)]}"/>')
        label = f"{LIMIT}: the frozen model's forward and backward" if name == LIMIT else name
        parts.append(_text(x + 20, y - 3, label, anchor="start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT + LEGEND}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>\n"])


def human(number: float) -> str:
    """Return a number in three digits at most: 512, 1k, 163M, 1.5G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1000.0)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _text(x: float, y: float, text: str, *, anchor: str, size: int = 11) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} font-family="sans-serif" fill="#333333">{escape(text)}</text>'


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the figures of one or several runs of `benchmarks.step`, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("figures", nargs="+", type=Path, help="JSON files that benchmarks.step wrote")
    parser.add_argument("--output", type=Path, default=Path("cost.svg"))
    options = parser.parse_args(arguments)
    rows = [row for file in options.figures for row in facts.read_json(file)["figures"]["step"]]
    options.output.write_text(draw(rows), encoding="utf-8")
    print(options.output)


if __name__ == "__main__":
    main()
