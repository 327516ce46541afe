"""The README is a page, its commands are CI's, no link leads nowhere, every command and option is told of."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    *PAGES,
]
MADE = re.compile(r"docs/reference/(?!index)[\w-]+\.md")
"""Pages that the documentation's build makes."""
ROOM = re.compile(r"`((?:rotexp|conf|docs|tests|benchmarks|multirun_scripts|examples|hydra_plugins)/[\w./-]*)`")
"""A path of the repository as pages write it; the folders of a user's own start elsewhere."""


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def shell_lines(text: str) -> Iterator[str]:
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def commands(lines: Iterator[str]) -> Iterator[frozenset[str]]:
    """Yield the words of each command of rotexp or pip, however lines chain them."""
    for line in lines:
        for command in line.split("&&"):
            words = frozenset(re.findall(r"[^\s\"']+", command)) - {"-q"}
            if {"pip", "install"} <= words or any(
                word.startswith(("rotexp.", "rotexp-", "$(rotexp-")) for word in words
            ):
                yield words


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_one_page_with_pictures() -> None:
    text = read(ROOT / "README.md")
    assert len(text.split()) <= 700
    assert len(re.findall(r"!\[[^\]]+\]\(docs/pictures/\w+\.svg\)", text)) >= 2


def test_ci_runs_every_command_of_the_readme() -> None:
    run = [*commands(iter(read(ROOT / ".ci" / "run").replace("\\\n", " ").splitlines()))]
    asked = [*commands(shell_lines(read(ROOT / "README.md")))]
    assert len(asked) >= 9
    assert [sorted(words) for words in asked if not any(words <= other for other in run)] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_or_path_of_a_page_leads_nowhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    targets = [(page.parent / link).resolve() for link in links if link] + [ROOT / path for path in ROOM.findall(text)]
    lost = [target for target in targets if not target.exists()]
    assert [str(target.relative_to(ROOT)) for target in lost if not MADE.fullmatch(str(target.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    "file",
    sorted(file for file in (ROOT / "rotexp").glob("*.py") if file.stem != "__init__"),
    ids=lambda file: file.stem,
)
def test_every_command_is_told_of(file: Path) -> None:
    assert any(f"rotexp.{file.stem}" in read(page) for page in PAGES)


@pytest.mark.parametrize("group", sorted(folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()))
def test_every_group_and_option_is_told_of(group: str) -> None:
    told = "\n".join(map(read, PAGES))
    assert re.search(rf"`(?:-m )?{group}=?", told)
    if group != "model":  # whose presets are sizes
        options = [file.stem for file in (ROOT / "conf" / group).glob("*.yaml")]
        assert [option for option in options if not re.search(rf"[`=]{option}\b", told)] == []


def test_the_citation_says_whom_and_what_to_cite() -> None:
    citation = yaml.safe_load(read(ROOT / "CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= citation.keys()
    assert citation["authors"] == [{"name": "The rotexp developers"}]
    project = read(ROOT / "pyproject.toml")
    assert f'version = "{citation["version"]}"' in project
    assert f'license = "{citation["license"]}"' in project
    assert f"## [{citation['version']}] - {citation['date-released']}" in read(ROOT / "CHANGELOG.md")


def test_pictures_are_those_that_the_script_draws() -> None:
    drawings = load("draw").DRAWINGS
    assert {file.stem for file in (DOCS / "pictures").iterdir()} == drawings.keys()
    for name, draw in drawings.items():
        assert read(DOCS / "pictures" / f"{name}.svg") == draw(), "run python docs/draw.py"


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").iterdir()), ids=lambda picture: picture.stem)
def test_pictures_need_nothing_from_elsewhere_and_say_what_they_show(picture: Path) -> None:
    text = read(picture)
    root = ElementTree.fromstring(text)
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1, "the name of SVG's namespace"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    return load("hooks")


def test_the_table_of_keys_has_every_key_with_its_default_and_meaning(hooks: ModuleType) -> None:
    page = hooks.keys_page()
    assert "| `optimizer.lr` | `0.1` | the learning rate." in page
    assert "| `quant.weights.bits` | `4` | width of a code" in page
    assert "| `sync_mode.mode` | `off` (or `selective`, `universal`, `event`) |" in page
    assert "| `data.revision` | `null` | of WikiText-2" in page
    assert "| `quant=w16a4` | Weights as they are" in page
    assert "| `experiment=bits` | Question: from how many bits" in page
    assert "_target_" not in page


def test_the_table_of_metrics_has_every_metric_once(hooks: ModuleType) -> None:
    lines = hooks.metrics_page().splitlines()
    for metric in hooks.METRICS:
        assert len([line for line in lines if line.startswith(f"| `{metric.name}` | {metric.unit} |")]) == 1, (
            metric.name
        )
    headings = [line for line in lines if line.startswith("## ")]
    assert len(headings) == len({*headings})


def test_every_module_has_its_place_in_the_reference(hooks: ModuleType) -> None:
    pages = "\n".join(map(hooks.room_page, hooks.ROOMS))
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (ROOT / "rotexp").glob("*/**/*.py")]
    assert [name for name in modules if "__init__" not in name and f"::: {name}\n" not in pages] == []


@pytest.mark.parametrize(
    "loading",
    [
        '<script src="https://a.b/c.js">',
        "<script defer src=//a.b/c.js>",
        '<link rel="stylesheet" href="http://a.b/c.css">',
        '<img alt="" src="https://a.b/c.png">',
    ],
)
def test_a_page_that_needs_the_network_is_refused(hooks: ModuleType, loading: str) -> None:
    class Shown:
        file = type("File", (), {"src_uri": "index.md"})

    local = '<link href="assets/a.css"><script src="assets/a.js"></script><a href="https://a.b">there</a>'
    assert hooks.on_post_page(local, Shown) == local
    with pytest.raises(hooks.PluginError, match=r"^index\.md: loads <\w+ .*a\.b.* from the network$"):
        hooks.on_post_page(local + loading, Shown)
