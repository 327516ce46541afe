"""The page in headless Chromium: it opens without an error or a request, sorts, filters, switches axes."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run, step_row, summary

from rotexp.comparison.checks import Check
from rotexp.comparison.collect import collect
from rotexp.comparison.page import page as make_page

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
NEEDED = "needs playwright (pip install -e '.[dev]') and a Chromium (Debian: apt-get install chromium-headless-shell)"

playwright = pytest.importorskip("playwright.sync_api", reason=NEEDED)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=NEEDED)

HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings of two seeds, a run that failed, one that was never trained."""
    folder = tmp_path_factory.mktemp("sweep")
    for sharding, base in (("full", 30.0), ("no_shard", 9.5)):
        for seed in range(2):
            rows = [
                step_row(step, loss=3.0 - step / 8 + seed, **{"replica/max_abs_diff": step % 2 * 1e-9})
                for step in range(1, 9)
            ]
            end = summary(perplexity=base + seed, world_size=2)
            make_run(folder / f"{sharding}-{seed}", end=end, rows=rows, sharding__strategy=sharding, seed=seed)
    rows = [step_row(1), step_row(2, loss="nan")]
    make_run(folder / HOSTILE, end={"status": "failed", "error": HOSTILE}, rows=rows, sharding__strategy="zero2")
    make_run(folder / "evaluated", end=summary(perplexity=100.0), rows=[], train__steps=0)
    (folder / "report.html").write_text(make_page(collect([folder], command="report it")), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as session:
        opened = session.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened; whatever goes wrong in it, and whatever it asks for, fails the test at its end."""
    opened = browser.new_page(viewport={"width": getattr(request, "param", 1280), "height": 900})
    wrong: list[str] = []
    opened.on("console", lambda message: wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda asked: wrong.append(asked.url) if asked.url != file.as_uri() else None)
    opened.goto(file.as_uri())
    opened.wait_for_selector("#cost-plot .main-svg")
    yield opened
    opened.close()
    assert wrong == []


def names(page: Any) -> list[str]:
    return page.locator("#summary tbody th").all_inner_texts()


def drawn(page: Any, figure: str, what: str) -> Any:
    return page.evaluate(f"document.getElementById('{figure}-plot').{what}")


@pytest.mark.parametrize("page", [1280, 420], ids=["wide", "narrow"], indirect=True)
def test_the_page_opens_whole_at_every_width(page: Any, tmp_path: Path) -> None:
    assert names(page) == [HOSTILE, "evaluated", "full-0", "full-1", "no_shard-0", "no_shard-1"]
    assert page.title() == "rotexp report: 6 runs"
    assert page.locator("#summary img").count() == 0
    assert page.locator("#summary .remark").all_inner_texts() == [HOSTILE]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture = tmp_path / "page.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 50_000


def test_a_column_sorts_by_number_both_ways_and_what_is_missing_comes_last(page: Any) -> None:
    head = page.locator("th[data-column='eval/trained/perplexity']")
    head.locator("button").click()
    assert names(page) == ["no_shard-0", "no_shard-1", "full-0", "full-1", "evaluated", HOSTILE]
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert names(page) == ["evaluated", "full-1", "full-0", "no_shard-1", "no_shard-0", HOSTILE]
    assert page.locator("th[data-column='run']").get_attribute("aria-sort") == "none"


def test_filters_narrow_the_table_and_every_figure(page: Any) -> None:
    assert len(drawn(page, "curve", "data")) == 5
    page.locator("[data-filter='sharding'] button", has_text="full").click()
    assert names(page) == ["full-0", "full-1"]
    assert [len(drawn(page, figure, "data")) for figure in ("curve", "divergence", "drift", "memory", "cost")] == [
        2
    ] * 5
    page.locator("[data-filter='seed'] button", has_text="1").click()
    assert names(page) == ["full-1"]
    page.locator("[data-filter='seed'] button", has_text="1").click()
    page.locator("[data-filter='sharding'] button", has_text="no_shard").click()
    assert len(names(page)) == 5
    page.locator("input[type=search]").fill("no_shard-1")
    assert names(page) == ["no_shard-1"]
    assert page.locator("#shown").inner_text() == "1 of 6 runs"


def test_curves_switch_metric_axis_and_scale(page: Any) -> None:
    page.locator("[data-filter='sharding'] button", has_text="full").click()
    assert drawn(page, "curve", "data[0].x") == list(range(1, 9))
    assert drawn(page, "curve", "data[0].y") == [3.0 - step / 8 for step in range(1, 9)]
    page.select_option("#curve-over", "tokens")
    assert drawn(page, "curve", "data[0].x") == [2048 * step for step in range(1, 9)]
    page.select_option("#curve-over", "seconds")
    assert drawn(page, "curve", "data[0].x") == [step / 2 for step in range(1, 9)]
    assert drawn(page, "divergence", "layout.xaxis.title.text") == "training time (s)"
    page.select_option("#curve-metric", "grad_norm/total")
    assert drawn(page, "curve", "data[0].y") == [1.0] * 8
    page.select_option("#curve-scale", "log")
    assert drawn(page, "curve", "layout.yaxis.type") == "log"


def test_zero_has_a_place_on_a_logarithmic_axis(page: Any) -> None:
    assert drawn(page, "divergence", "layout.yaxis.type") == "log"
    points, ticks = drawn(page, "divergence", "data[1].y"), drawn(page, "divergence", "layout.yaxis.tickvals")
    assert points == pytest.approx([1e-9, 1e-10] * 4)
    assert dict(zip(ticks, drawn(page, "divergence", "layout.yaxis.ticktext"), strict=True))[points[1]] == "0"


def test_what_is_not_finite_is_said(page: Any) -> None:
    caption = page.locator("[data-figure='curve'] figcaption").inner_text()
    assert f"Not finite, and not drawn: {HOSTILE} is nan at step 2." in caption
    assert drawn(page, "curve", "data[0].y") == [2.5, None]


def test_memory_reaches_from_the_smallest_rank_to_the_largest(page: Any) -> None:
    page.select_option("#memory-phase", "load")
    bar = drawn(page, "memory", "data[1]")
    assert (bar["y"], bar["error_y"]["arrayminus"], bar["error_y"]["array"]) == ([0.75], [0.25], [0])


def test_cost_is_ranks_times_time(page: Any) -> None:
    page.select_option("#cost-measure", "train/device_hours")
    page.select_option("#cost-quality", "eval/trained/kl")
    point = next(point for point in drawn(page, "cost", "data") if point["name"].endswith("full-1"))
    assert (point["x"], point["y"]) == ([pytest.approx(2 * 2.0 / 3600)], [0.2])


def test_configurations_of_chosen_runs_are_compared(page: Any) -> None:
    page.locator("#choose-none").click()
    assert page.locator("#chosen-text").inner_text() == "Choose two runs or more."
    for name in ("full-0", "no_shard-1"):
        page.get_by_label(f"choose {name}", exact=True).check()
    rows = [row.split("\t") for row in page.locator("#differing tr").all_inner_texts()]
    assert rows == [["key", "full-0", "no_shard-1"], ["seed", "0", "1"], ["sharding.strategy", "full", "no_shard"]]


def test_settings_are_compared_by_the_figure_chosen(page: Any) -> None:
    verdicts = page.locator("#spreads tbody td:last-child")
    assert verdicts.all_inner_texts()[:2] == ["best", "exceeds the spread over seeds"]
    page.select_option("#spread-figure", "eval/trained/kl")
    assert "within the spread over seeds" in verdicts.all_inner_texts()


def test_every_figure_names_the_commands_that_made_it(page: Any) -> None:
    page.locator("[data-filter='sharding'] button", has_text="full").click()
    for details in page.locator("figcaption details").all():
        details.locator("summary").click()
        commands = details.locator("code")
        commands.nth(2).wait_for()
        first, *others = commands.all_inner_texts()
        assert first == "report it"
        assert [command.split()[:3] for command in others] == [["python", "-m", "rotexp.train"]] * 2


def test_colors_tell_settings_apart_and_lines_seeds(page: Any) -> None:
    page.select_option("#color-by", "sharding")
    styles = {
        trace["name"].split("· ")[1]: (trace["line"]["color"], trace["line"]["dash"])
        for trace in drawn(page, "curve", "data")
    }
    assert styles["full-0"][0] == styles["full-1"][0] != styles["no_shard-0"][0]
    assert styles["full-0"][1] == styles["no_shard-0"][1] != styles["full-1"][1]
    assert page.locator("#notes li").count() == 0


def test_letters_filter_and_recipes_are_shown_where_there_are_any(browser: Any, file: Path, tmp_path: Path) -> None:
    for name, digest in (("a", "x"), ("b", "x"), ("c", "y")):
        make_run(tmp_path / name, end=summary(rotations_digest=digest))
    check = Check("tiny", "a", equal=3, moved=1, faults=[HOSTILE])
    (tmp_path / "report.html").write_text(make_page(replace(collect([tmp_path], command=""), checks=[check])))
    opened = browser.new_page()
    opened.goto((tmp_path / "report.html").as_uri())
    opened.locator("[data-filter='bits'] button", has_text="A").click()
    assert names(opened) == ["a", "b"]
    assert opened.locator("#checks tbody tr").inner_text().split("\t") == [
        "tiny",
        "a",
        "3",
        "0",
        "1",
        f"does not hold\n{HOSTILE}",
    ]
    opened.goto(file.as_uri())
    assert not opened.locator("#recipes").is_visible()
    assert opened.locator("[data-column='bits']").count() == 0
    opened.close()
