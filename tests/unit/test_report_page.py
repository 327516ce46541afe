"""The page as a file: it holds the runs' values, loads nothing, and no text in it becomes markup."""

import json
import math
from html.parser import HTMLParser
from typing import Any

import pytest
from report_runs import make_run, step_row, summary

from rotexp.comparison.collect import collect
from rotexp.comparison.page import embedded, page
from rotexp.comparison.payload import MOST_POINTS, thinned

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>"
LOADING = {"src", "href", "action", "data", "poster", "srcset", "background", "formaction"}


class Page(HTMLParser):
    """Collects elements, what they would load, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.policy = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.loaded += [str(given[name]) for name in LOADING & given.keys()]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(given["content"])
        if tag in ("script", "style"):
            self.scripts.append((given, ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem and self.scripts:
            given, text = self.scripts[-1]
            self.scripts[-1] = (given, text + data)

    @property
    def data(self) -> Any:
        return next(json.loads(text) for given, text in self.scripts if given.get("id") == "data")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sweep")
    rows = [step_row(step, loss=3.0 - step / 8) for step in range(1, 4)] + [step_row(4, loss="nan")]
    make_run(folder / "0", end=summary(perplexity=30.0625), rows=rows)
    hostile = {"status": "failed", "error": f"it said {HOSTILE}\u2028"}
    make_run(folder / HOSTILE.replace("/", "|"), end=hostile, model__path=HOSTILE, seed=1)
    return page(collect([folder], command=f"python -m rotexp.report '{HOSTILE}'"))


def test_nothing_is_loaded_from_anywhere(text: str) -> None:
    found = Page(text)
    assert [target for target in found.loaded if not target.startswith("#")] == []
    assert found.policy.startswith("default-src 'none';")
    assert "connect-src" not in found.policy
    assert "@import" not in text.partition("</style>")[0]


def test_plotly_is_there_once(text: str) -> None:
    sizes = sorted(len(script) for _, script in Page(text).scripts)
    assert sizes[-1] > 3_000_000 > 100_000 > sizes[-2]


def test_texts_of_runs_stay_texts(text: str) -> None:
    found = Page(text)
    assert found.tags.count("script") == 3
    assert "img" not in found.tags
    assert found.data["command"] == f"python -m rotexp.report '{HOSTILE}'"
    second = found.data["runs"][1]
    assert second["axes"]["model.path"] == HOSTILE
    assert second["remark"] == f"it said {HOSTILE}"


def test_the_data_are_the_runs_values(text: str) -> None:
    data = Page(text).data
    run = data["runs"][0]
    assert run["figures"]["eval/trained/perplexity"] == 30.0625
    assert run["memory"]["load"] == {"peak_rss_gib_max": 0.75, "peak_rss_gib_min": 0.5}
    assert run["series"]["train/loss"] == [[1, 2, 3, 4], [2.875, 2.75, 2.625, "nan"]]
    assert run["clock"] == {"steps": [1, 2, 3, 4], "tokens": [2048, 4096, 6144, 8192], "seconds": [0.5, 1.0, 1.5, 2.0]}
    assert run["config"]["optimizer.lr"] == 0.1
    assert data["runs"][1]["figures"]["eval/trained/perplexity"] is None


def test_every_metric_brings_its_unit_and_meaning(text: str) -> None:
    data = Page(text).data
    assert data["metrics"]["train/loss"] == {
        "unit": "nats",
        "meaning": "objective on the global batch (or a simulated rank's share), before the step",
    }
    assert all(metric["meaning"] for metric in data["metrics"].values())
    assert all(figure["meaning"] for figure in data["figures"])
    assert not any(key.startswith(("eval/", "memory/load")) for key in data["metrics"])


def test_data_cannot_end_their_element() -> None:
    written = embedded({"a": "</script>", "b": math.nan, "c": "<!--"})
    assert "<" not in written
    assert json.loads(written) == {"a": "</script>", "b": "nan", "c": "<!--"}


def test_long_curves_are_thinned_but_keep_their_end_and_what_is_not_finite() -> None:
    values = {step: float(step) for step in range(1, 10 * MOST_POINTS + 5)}
    values[13] = math.inf
    steps, points = thinned(values)
    assert MOST_POINTS / 2 < len(steps) <= MOST_POINTS + 2
    assert (steps[0], steps[-1]) == (1, 10 * MOST_POINTS + 4)
    assert points[steps.index(13)] == math.inf
    assert thinned({1: 2.0, 5: 3.0}) == ([1, 5], [2.0, 3.0])
