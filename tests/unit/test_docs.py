"""The README is a page, its commands are CI's, pages' code runs, no link leads nowhere, every command is told of."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
import yaml
from hydra import compose, initialize_config_module
from test_architecture import COMMANDS, ORDER

import rotexp
import rotexp.testing
from rotexp.config.components import Pluggable
from rotexp.config.composition import to_config
from rotexp.config.plugins import typed_plugins
from rotexp.config.schema import Config
from rotexp.config.targets import components_of
from rotexp.launch.command_line import register
from rotexp.metrics import keys
from rotexp.models import arch
from rotexp.runfolder.records import MetricsFile, read_metrics
from rotexp.sharding.strategies import check_strategy_options
from rotexp.tracking.recording import Trackers
from rotexp.training.parts import check_parts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *PAGES,
]
MADE = re.compile(r"docs/reference/(?!index)[\w-]+\.md")
"""Pages that the documentation's build makes."""
ROOM = re.compile(r"`((?:rotexp|conf|docs|tests|benchmarks|multirun_scripts|examples|hydra_plugins)/[\w./-]*)`")
"""A path of the repository as pages write it; the folders of a user's own start elsewhere."""
FENCE = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A block of code that is written on a page (those of files begin with ``` {.python}): language, file, text."""


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


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return the file and the text of every block of a language that is written on a page."""
    return [(title, text) for kind, title, text in FENCE.findall(read(page)) if kind == language]


def notebook_code() -> str:
    cells = json.loads(read(ROOT / "examples" / "quickstart.ipynb"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code") + "\n"


def test_python_of_pages_is_run() -> None:
    """By tests of the notebook, by the test of the page's parts below, or by the ranks of tests/distributed."""
    ranks = read(ROOT / "tests" / "distributed" / "ranks_accelerate.py")
    assert 'PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"' in ranks
    run_elsewhere = {"extending.md": 8, "sharding.md": 1}
    for page in WRITTEN:
        others = [text for _, text in blocks(page, "python") if text != notebook_code()]
        assert len(others) == run_elsewhere.get(page.name, 0), page


def test_the_readme_and_the_page_from_python_show_the_notebook() -> None:
    for page in (ROOT / "README.md", DOCS / "python.md"):
        assert notebook_code() in [text for _, text in blocks(page, "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_files_that_pages_show_are_there(page: Path) -> None:
    shown = re.findall(r'--8<-- "(.+)"', read(page))
    assert [file for file in shown if not (ROOT / file).is_file()] == []


EXTENDING = DOCS / "extending.md"


def typed_on(page: Path, beginning: str) -> list[tuple[str, list[str]]]:
    """Return the folder and the arguments of every command of a page that begins so."""
    commands = re.findall(rf"^(?:cd (\S+) && )?{re.escape(beginning)} (.*)$", "\n".join(shell_lines(read(page))), re.M)
    return [(folder, arguments.split()) for folder, arguments in commands]


def checked(config_dir: Path, overrides: list[str]) -> Config:
    """Compose what a command asks for and try its parts, as the command does before anything is started."""
    register()
    with initialize_config_module("rotexp.conf", version_base="1.3"):
        composed = compose("config", overrides=[f"hydra.searchpath=[file://{config_dir}]", *overrides])
    config = to_config(composed, typed=typed_plugins(overrides))
    check_parts(config)
    check_strategy_options(config.sharding)
    return config


def own_targets(config: Config) -> list[str]:
    parts = [part for _, part in components_of(config) if not isinstance(part, Pluggable) or part.target]
    return [part._target_ for part in parts if not part._target_.startswith("rotexp.")]


@pytest.fixture
def their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the page on extending shows whole."""
    for language in ("python", "yaml"):
        for title, text in blocks(EXTENDING, language):
            if title:
                file = tmp_path / title
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(read(file) + text if file.exists() else text)
    (tmp_path / "my_text.txt").write_text("One half.\n" * 40 + "The other one.\n" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_parts", None)


def test_parts_of_the_page_on_extending_are_taken_by_its_commands(their_folder: Path) -> None:
    found = []
    for _, arguments in typed_on(EXTENDING, "python -m rotexp.train --config-dir conf"):
        if "plugins=[my_parts]" in arguments:
            found += own_targets(checked(their_folder / "conf", arguments))
    assert sorted(found) == [f"my_parts.{name}" for name in ("Halves", "Householder", "Sharpened", "Trapezoid")]


def test_checks_of_the_page_on_extending_pass(their_folder: Path) -> None:
    checks = [text for title, text in blocks(EXTENDING, "python") if not title]
    for text in checks:
        exec(text, {})
    assert len(checks) == 4
    named = set(re.findall(r"\bcheck_\w+", read(EXTENDING)))
    assert named == set(rotexp.testing.__all__)


COMMANDS_IN_FOLDERS = [typed for typed in typed_on(EXTENDING, "python -m rotexp.train") if typed[0]]


@pytest.mark.parametrize(("folder", "arguments"), COMMANDS_IN_FOLDERS, ids=lambda given: given[-1])
def test_plug_ins_of_the_examples_are_taken_by_the_commands_of_the_page(
    folder: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, config_dir, plugin, *overrides = arguments
    assert option == "--config-dir"
    monkeypatch.chdir(ROOT / folder)
    monkeypatch.syspath_prepend(ROOT / folder)
    if plugin == "plugins=[geoopt_adam]":
        pytest.importorskip("geoopt", reason="pip install -e '.[bench]'")
    module = plugin.removeprefix("plugins=[").removesuffix("]")
    monkeypatch.delitem(sys.modules, module, raising=False)  # other tests get theirs back
    targets = own_targets(checked(ROOT / folder / config_dir, [plugin, *overrides]))
    assert {target.partition(".")[0] for target in targets} == {module}
    shown = re.findall(r'--8<-- "(.+)"', read(EXTENDING))
    assert plugin == "plugins=[mxfp4]" or f"{folder}/{module}.py" in shown


def test_commands_of_pages_compose() -> None:
    """Those that train once by files of rotexp's alone; FILE stands for a text of the user's own."""
    composed = 0
    for page in [ROOT / "README.md", *PAGES]:
        for line in shell_lines(read(page)):
            _, command, typed = line.partition("python -m rotexp.train ")
            words = shlex.split(typed)
            if command and not any(word.startswith("-") for word in words):
                rotexp.load_config([word.replace("FILE", f"{index}.txt") for index, word in enumerate(words)])
                composed += 1
    assert composed >= 6


def test_every_plug_in_of_the_examples_is_one_file_and_one_yaml_and_stands_on_the_pages() -> None:
    folder = ROOT / "examples" / "plugins"
    own = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    by_kind = {suffix: [file for file in own if file.suffix == suffix] for suffix in (".py", ".yaml")}
    assert len(by_kind[".py"]) == len(by_kind[".yaml"]) >= 5
    scripts = [file for file in (ROOT / "examples").iterdir() if file.suffix in (".py", ".ipynb")]
    for page in (DOCS / "examples.md", ROOT / "examples" / "README.md"):
        assert [file.name for file in [*by_kind[".py"], *scripts] if file.name not in read(page)] == [], page
    commands = [typed for typed in typed_on(DOCS / "examples.md", "python -m rotexp.train") if typed[0]]
    assert sorted(commands) == sorted(COMMANDS_IN_FOLDERS), "those of examples/README.md are held by test_examples"


OPTIMIZER = '''"""A new optimizer."""

import torch


class Steepest(torch.optim.Optimizer):
    """Gradient steps, each followed by a QR decomposition."""

    def __init__(self, params, lr: float, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    def initial_state(self, rotation):
        return {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for rotation in group["params"]:
                if rotation.grad is not None:
                    skew = rotation.grad @ rotation.mT - rotation @ rotation.grad.mT
                    retract(rotation.sub_(group["lr"] * group["scale"] * skew @ rotation))

    @torch.no_grad()
    def project(self) -> None:
        for group in self.param_groups:
            for rotation in group["params"]:
                retract(rotation)


def retract(matrix) -> None:
    q, r = torch.linalg.qr(matrix)
    matrix.copy_(q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2))
'''
TAKE = """
import rotexp
from rotexp.optim.steepest import Steepest
from rotexp.testing import check_optimizer
from rotexp.training.parts import check_parts

config = rotexp.load_config(["optimizer=steepest", "optimizer.lr=0.2"])
check_parts(config)
part = config.optimizer
check_optimizer(Steepest, **part.options)
print(rotexp.__file__, part.name, part.options)
"""


def test_a_new_optimizer_costs_one_file_and_one_yaml(tmp_path: Path) -> None:
    """In a copy of the tree, as it is installed."""
    skipped = shutil.ignore_patterns("__pycache__", "weights")
    shutil.copytree(ROOT / "rotexp", tmp_path / "rotexp", ignore=skipped)
    shutil.copytree(ROOT / "conf", tmp_path / "rotexp" / "conf", ignore=skipped)
    (tmp_path / "rotexp" / "optim" / "steepest.py").write_text(OPTIMIZER)
    described = "name: steepest\n_target_: rotexp.optim.steepest.Steepest\nlr: 0.1\nscale: 0.5\n"
    (tmp_path / "rotexp" / "conf" / "optimizer" / "steepest.yaml").write_text(described)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", TAKE]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ended.stdout.strip() == f"{tmp_path}/rotexp/__init__.py steepest {{'lr': 0.2, 'scale': 0.5}}", ended.stderr


def test_a_new_metric_costs_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the line that measures it."""
    trackers = Trackers([MetricsFile(tmp_path)])
    with pytest.raises(KeyError, match="train/answer"):
        trackers.log({"train/answer": 42.0}, step=1)
    monkeypatch.setattr(keys, "METRICS", (*keys.METRICS, keys.Metric("train/answer", "", "of everything")))
    keys.find_metric.cache_clear()
    try:
        trackers.log({"train/answer": 42.0}, step=1)
    finally:
        keys.find_metric.cache_clear()
    trackers.finish({}, exit_code=0)
    assert read_metrics(tmp_path) == [{"step": 1, "train/answer": 42.0}]


def test_a_new_family_costs_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a structure that none has: Persimmon's."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**sizes, vocab_size=61)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with pytest.raises(ValueError, match="model_type=persimmon: this architecture is not supported"):
        rotexp.place(model)
    persimmon = replace(
        arch.GPT_NEOX,
        model_types=("persimmon",),
        layers="model.layers",
        final_norm="model.final_layernorm",
        norms={
            "input_layernorm": ("self_attn.query_key_value",),
            "post_attention_layernorm": ("mlp.dense_h_to_4h",),
        },
        attention="self_attn",
        value="self_attn.query_key_value",
        output="self_attn.dense",
        writers=("self_attn.dense", "mlp.dense_4h_to_h"),
        internal=("self_attn.?_layernorm.*",),
    )
    monkeypatch.setattr(arch, "FAMILIES", (*arch.FAMILIES, persimmon))
    placed = rotexp.place(model, rotation="learned_r4")
    assert [name for name, _ in placed.bank.items()] == ["R1", "R2_0", "R2_1"]
    assert rotexp.prepare(placed) < 1e-5
    assert rotexp.merge(placed) < 1e-5


def test_the_costs_of_contributing_are_those_that_tests_count() -> None:
    rows = re.findall(r"^\| an? [\w ]+ \|.*\| `(tests/\S+)::(\w+)` \|$", read(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    assert len(rows) >= 6
    assert [name for file, name in rows if f"def {name}(" not in read(ROOT / file)] == []


def test_the_page_on_architecture_has_every_room_in_the_order_of_imports() -> None:
    page = read(DOCS / "architecture.md")
    told = re.findall(r"^\| \[`rotexp/(\w+)/`\]\(reference/\1\.md\)", page, re.MULTILINE)
    assert set(told) == {file.parent.name for file in (ROOT / "rotexp").glob("*/__init__.py")}
    assert told == sorted(told, key=ORDER.index)
    commands = re.findall(r"`(?:rotexp/)?(\w+)\.py`", page.partition("\n| [")[0])
    assert {*commands} - {"test_architecture"} == {*COMMANDS}
    modules = re.findall(r"`((?:\w+/)+\w+\.py)`", page)
    assert [name for name in modules if not any((place / name).is_file() for place in (ROOT, ROOT / "rotexp"))] == []
    phases = page[page.index("**load") : page.index("evaluate**")] + "evaluate"
    found = re.findall(r'phase\("(\w+)"\)', read(ROOT / "rotexp" / "experiment" / "experiment.py"))
    assert re.findall(r"\w+", phases) == found


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
    assert "| `quant.weights.bits` | `4` | width of an integer" in page
    assert "| `sync_mode.mode` | `off` (or `selective`, `universal`, `event`) |" in page
    assert "| `data.revision` | `null` | of WikiText-2" in page
    assert "| `quant=w16a4` | Weights as they are" in page
    assert "| `experiment=bits` | Question: from how many bits" in page
    assert re.findall(r"^\| `[\w.]*(?:_target_|options)`", page, re.MULTILINE) == []


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
