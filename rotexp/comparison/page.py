"""The self-contained HTML page: the report's data, the page's own script, and plotly.js, in one file."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from rotexp.comparison.collect import Report
from rotexp.comparison.payload import payload
from rotexp.runfolder.records import finite

SCRIPTS = ("values", "axes", "summary", "seeds", "figures", "differences", "recipes", "main")
"""In the order in which they build on each other."""


def page(report: Report) -> str:
    """Return the page as text; whatever names and errors hold, it shows them as they are."""
    folder = files("rotexp.comparison").joinpath("web")

    def part(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    return Template(part("page.html")).substitute(
        title=html.escape(f"rotexp report: {len(report.runs)} run{'s' * (len(report.runs) > 1)}"),
        style=part("page.css"),
        plotly=get_plotlyjs(),
        data=embedded(payload(report)),
        script="\n".join(part(f"{name}.js") for name in SCRIPTS),
    )


def embedded(data: object) -> str:
    """Return JSON that no text in it can end before its time, within a script element."""
    text = json.dumps(finite(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
