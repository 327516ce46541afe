"""Every example runs as its README says, and finds what it is to show."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rotexp import load_config

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 "
SHOWN = {
    "own_model.py": r"saved and loaded by plain transformers: logits [0-9]e-0[67] \(relative\)",
    "only_the_optimizer.py": r"^found 0\.0\d+, best 0\.0\d+$",
    "only_the_guard.py": r"^3 groups, 12 unshards \{'forward': 6, 'pre_backward': 6\}, 12 waits$",
    "only_the_coordinator.py": r"^step 3: loss \d\.\d{4}, gradient norm \d\.\d{4}$",
}
"""What each script says at last; that it is right the scripts themselves assert."""

EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


GROUPS = {"formats": "quant", "geoopt_adam": "optimizer", "last_layers": "sharding", "tensorboard": "tracker"}
"""What the plug-ins of each folder are options of."""


def listed() -> dict[str, str]:
    """Return the commands of the README's tables by file."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.*?)\]\((.*?)\) \|.*\| `(.*)` \|$", text, re.MULTILINE)
    assert all(name == link for name, link, _ in rows)
    return {name: command for name, _, command in rows}


def command_of(example: str) -> list[str]:
    """Return the command of an example as the README's table has it, for this interpreter."""
    line = listed()[example]
    assert line.endswith(f" examples/{example}")
    launcher = ["-m", "torch.distributed.run", *TORCHRUN.split()[1:]] if line.startswith(TORCHRUN) else []
    return [sys.executable, *launcher, str(EXAMPLES / example)]


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder; return its output."""
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, timeout=280, env=os.environ
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_the_readme_lists_every_example() -> None:
    files = {str(file.relative_to(EXAMPLES)) for kind in ("*.py", "*.ipynb") for file in EXAMPLES.rglob(kind)}
    assert files == {*listed()}
    assert {name for name in files if not name.startswith("plugins/")} == {*SHOWN, "quickstart.ipynb"}


def test_plugins_lie_as_one_another() -> None:
    files = {file.relative_to(EXAMPLES / "plugins") for file in EXAMPLES.glob("plugins/**/*.yaml")}
    assert {file.parent for file in files} == {Path(name, "conf", group) for name, group in GROUPS.items()}
    assert {folder.name for folder in (EXAMPLES / "plugins").iterdir()} == {*GROUPS}


@pytest.mark.parametrize("plugin", [name for name in listed() if name.startswith("plugins/")])
def test_the_command_of_a_plugin_composes_as_the_readme_and_the_file_have_it(
    plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "geoopt" in plugin:
        pytest.importorskip("geoopt")
    file, command = EXAMPLES / plugin, listed()[plugin]
    python, given = command.split(" --config-dir conf ")
    assert python == "python -m rotexp.train"
    monkeypatch.chdir(file.parent)
    monkeypatch.syspath_prepend(file.parent)
    config = load_config(given.split(), config_dir="conf")
    assert config.plugins == [file.stem]
    part = getattr(config, GROUPS[file.parent.name])
    assert f"{file.stem}." in str(dataclasses.asdict(part))
    if "--config-dir" in (text := file.read_text(encoding="utf-8")):
        assert f"`{command}`" in text


@pytest.mark.parametrize("example", SHOWN)
def test_a_script_shows_what_it_is_for(example: str, tmp_path: Path) -> None:
    assert re.search(SHOWN[example], run(command_of(example), tmp_path), re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_the_notebook_has_ten_lines_and_draws_the_loss(tmp_path: Path) -> None:
    notebook = EXAMPLES / "quickstart.ipynb"
    committed = json.loads(notebook.read_text(encoding="utf-8"))
    code = [cell for cell in committed["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(line.strip()) for cell in code for line in cell["source"]) == 10
    assert [cell["outputs"] for cell in code] == [[]] * len(code)

    run([sys.executable, "-c", EXECUTE, str(notebook), str(tmp_path / "executed.ipynb")], tmp_path)
    executed = json.loads((tmp_path / "executed.ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", [])]
    (figure,) = (output["data"] for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {}))
    (trace,) = figure["application/vnd.plotly.v1+json"]["data"]
    assert trace["x"] is not None
    assert any("trained" in "".join(output["data"].get("text/html", "")) for output in outputs if "data" in output)
    said = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")
    assert "step 20/20" in said
    assert "\x1b" not in said  # nothing moves a cursor that a notebook does not have
    (merged,) = tmp_path.glob("runs/*/*/merged/config.json")
    assert merged.is_file()
