"""Imports point down, loose modules are commands, and each outside library is used where the design says."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = "rotexp"

# From the entry down to pure maths: a part may import only itself and parts further down.
ORDER = (
    "train",
    "evaluate",
    "export",
    "inspect",
    "sync",
    "upload",
    "dashboard",
    "doctor",
    "report",
    "reproduce",
    "testing",
    "comparison",
    "recipes",
    "face",
    "launch.command_line",
    "sweep",
    "launch",
    "experiment",
    "tracking",
    "training",
    "metrics",
    "rotation",
    "models",
    "data",
    "sharding",
    "runfolder",
    "process",
    "config.explanations",
    "config.composition",
    "config.validation",
    "sharding.strategies",
    "config.targets",
    "config.signatures",
    "config.own_parts",
    "config.files_of_others",
    "config.plugins",
    "config.schema",
    "config",
    "experiment.options",
    "sweep.options",
    "launch.options",
    "tracking.options",
    "training.options",
    "metrics.options",
    "rotation.options",
    "models.options",
    "data.options",
    "sharding.options",
    "quant.options",
    "files",
    "quant",
    "optim",
    "orthogonal",
    "config.components",
    "errors",
)
COMMANDS = ORDER[: ORDER.index("testing")]
PURE = (("quant", "config.components", "errors"), ("optim", "orthogonal"), ("orthogonal",))
Imports = dict[str, set[str]]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted((ROOT / OURS).rglob("*.py"))}


def names_imported(file: Path) -> Iterator[str]:
    """Yield every module a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: import by the whole name"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from whole & MODULES.keys() or {str(node.module)}


IMPORTS: Imports = {module: set(names_imported(file)) for module, file in MODULES.items()}
OWN_IMPORTS: Imports = {
    module: {name for name in names if name.split(".")[0] == OURS} for module, names in IMPORTS.items()
}


def part_of(module: str) -> str | None:
    """Return the most specific part of the order that holds a module; None for the package itself."""
    name = module.removeprefix(f"{OURS}.")
    return max((part for part in ORDER if f"{name}.".startswith(f"{part}.")), key=len, default=None)


def upward(imports: Imports) -> list[str]:
    """Return the imports that point up."""
    found = []
    for importer, names in imports.items():
        for name in names:
            above, below = part_of(importer), part_of(name)
            if above and below and ORDER.index(below) < ORDER.index(above):
                found.append(f"{importer} imports {name}")
    return found


def users_of(library: str) -> set[str]:
    return {module for module, names in IMPORTS.items() if any(name.split(".")[0] == library for name in names)}


def test_every_module_has_its_place_in_the_order_and_every_place_a_module() -> None:
    places = {module: part_of(module) for module in MODULES if module != OURS}
    assert [module for module, place in places.items() if place is None] == []
    assert set(ORDER) == set(places.values())


def test_imports_point_down() -> None:
    assert upward(OWN_IMPORTS) == []


def test_an_upward_import_would_be_found() -> None:
    assert upward({"rotexp.data.blocks": {"rotexp.training.loop"}}) == [
        "rotexp.data.blocks imports rotexp.training.loop"
    ]
    assert upward({"rotexp.orthogonal.hadamard": {"rotexp.rotation.bank"}}) != []
    assert upward({"rotexp.rotation.bank": {"rotexp.orthogonal.hadamard"}}) == []


def test_no_modules_import_each_other() -> None:
    packages = {module for module, file in MODULES.items() if file.name == "__init__.py"}
    graph = {module: names - {module} for module, names in OWN_IMPORTS.items() if module not in packages}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


@pytest.mark.parametrize("parts", PURE, ids="+".join)
def test_pure_maths_imports_nothing_of_ours(parts: tuple[str, ...]) -> None:
    modules = {module for module in MODULES if part_of(module) in parts}
    assert modules
    for module in modules:
        assert {part_of(name) for name in OWN_IMPORTS[module]} <= set(parts), module


@pytest.mark.parametrize("above", ["training", "rotation", "experiment", "launch"])
def test_sharding_and_synchronization_do_not_know_what_is_trained(above: str) -> None:
    for module, names in OWN_IMPORTS.items():
        if module.startswith(f"{OURS}.sharding"):
            assert not any(f"{name}.".startswith(f"{OURS}.{above}.") for name in names), module


def test_only_the_entry_and_the_command_line_know_hydra() -> None:
    command_line = {
        "rotexp.train",
        "rotexp.config.plugins",
        "rotexp.config.files_of_others",
        "rotexp.launch.command_line",
        "rotexp.config.explanations",
        "rotexp.sweep.planner",
    }
    of_commands = {"rotexp.experiment.evaluation_request", "rotexp.experiment.export_request", "rotexp.recipes.request"}
    requests = {"rotexp.inspect"} | of_commands
    reading = {"rotexp.config.own_parts", "rotexp.config.composition", "rotexp.runfolder.finished_run"}
    from_python = {"rotexp.face.configs"}
    assert users_of("hydra") == command_line | from_python
    assert users_of("omegaconf") <= command_line | from_python | requests | reading


def test_only_tracking_knows_wandb() -> None:
    users = users_of("wandb")
    assert users
    assert all(module.startswith("rotexp.tracking.") for module in users)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_loose_module_is_a_command_of_at_most_40_lines(command: str) -> None:
    lines = MODULES[f"{OURS}.{command}"].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[-2].startswith("if __name__")


def test_every_loose_module_is_a_command() -> None:
    loose = {module.removeprefix(f"{OURS}.") for module, file in MODULES.items() if file.parent == ROOT / OURS}
    assert loose - {OURS} == {*COMMANDS}


@pytest.mark.parametrize(
    "module",
    ["rotexp.config.schema", "rotexp.launch.command_line", "rotexp.train", "rotexp.evaluate", "rotexp.face.run"],
)
def test_a_config_is_read_without_torch_or_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'transformers', 'wandb', 'accelerate'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == ""
