"""The wheel from the outside: installed into an empty environment, away from the checkout, its commands work."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from run_train import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rotexp", "hydra_plugins", "conf")
"""What a wheel is built from; from a copy, since building leaves files beside its sources."""

SMALL = ["train.steps=1", "evaluation.max_windows=2", "launch.threads=1"]

Command = Callable[..., subprocess.CompletedProcess[str]]


def finished(command: list[str | Path], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, env=environment, timeout=600)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return ended


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "source" / name)
    finished([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, folder / "source"], cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs a program of an environment that has the wheel and what it requires, in a folder of its own."""
    folder = tmp_path_factory.mktemp("outside")
    programs = folder / "environment" / "bin"
    finished([sys.executable, "-m", "venv", programs.parent], cwd=folder)
    finished([programs / "pip", "install", "-q", wheel], cwd=folder)

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return finished([programs / program, *arguments], cwd=folder)

    return run


def test_the_wheel_holds_configs_plugins_pages_and_weights_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    configs = {f"rotexp/{file.relative_to(ROOT)}" for file in (ROOT / "conf").rglob("*.yaml")}
    kept = [*(ROOT / "rotexp").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]
    kept += [
        *(ROOT / "rotexp" / "comparison" / "web").iterdir(),
        *(ROOT / "rotexp" / "models" / "tiny").glob("weights/*"),
    ]
    kept.append(ROOT / "rotexp" / "orthogonal" / "sequences.json")
    assert held == configs | {str(file.relative_to(ROOT)) for file in kept} | {"rotexp/conf/__init__.py"}


def test_a_run_a_sweep_and_their_report_away_from_the_checkout(command: Command) -> None:
    where = command("python", "-c", "import os, rotexp; print(os.getcwd(), rotexp.__file__)").stdout.split()
    folder, package = map(Path, where)
    assert package.is_relative_to(folder)
    run = command("rotexp-train", *SMALL, "hydra.run.dir=run")
    assert "┃ perplexity ┃" in run.stdout
    assert Run(folder / "run", 0, "", "").summary["status"] == "done"
    swept = command("rotexp-train", "-m", *SMALL, "seed=0,1", "hydra.sweep.dir=sweep", "tracker=jsonl")
    assert "(2 of 2 jobs done)" in swept.stdout
    jobs = sorted(path for path in (folder / "sweep").iterdir() if path.is_dir())
    summaries = [Run(job, 0, "", "").summary for job in jobs]
    assert [summary["status"] for summary in summaries] == ["done", "done"]
    single = Run(folder / "run", 0, "", "").perplexities
    assert single in [Run(job, 0, "", "").perplexities for job in jobs]
    shown = command("rotexp-report", "run", "sweep", "--html", "page.html").stdout
    assert "wrote page.html" in shown
    assert (folder / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert {path.name for path in folder.iterdir()} == {"environment", "run", "sweep", "page.html"}
