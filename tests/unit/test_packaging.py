"""What the wheel holds is what the source tree holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_on_disk_is_declared_and_no_other() -> None:
    files = [file for top in ("rotexp", "hydra_plugins") for file in (ROOT / top).rglob("__init__.py")]
    on_disk = {".".join(file.relative_to(ROOT).parent.parts) for file in files}
    assert sorted(SETTINGS["tool"]["setuptools"]["packages"]) == sorted(on_disk | {"rotexp.conf"})


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for file in (ROOT / "rotexp").rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_the_configuration_is_packaged_from_its_folder() -> None:
    setuptools = SETTINGS["tool"]["setuptools"]
    assert setuptools["package-dir"]["rotexp.conf"] == "conf"
    assert (ROOT / "conf" / "__init__.py").is_file()
    assert "**/*.yaml" in setuptools["package-data"]["rotexp.conf"]
    assert "weights/*" in setuptools["package-data"]["rotexp.models.tiny"]
    assert "web/*" in setuptools["package-data"]["rotexp.comparison"]


def test_declared_commands_exist() -> None:
    for target in SETTINGS["project"]["scripts"].values():
        module, function = target.split(":")
        assert f"def {function}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
