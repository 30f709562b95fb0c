"""What `pip install` lays down is the source tree, under import names that clash with nobody's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = {"eagle_cli": "cli", "eagle_recipes": "recipes", "eagle_train": "eagle_train"}
_DATA = ("*.yaml", "deepspeed/*.json", "*.jsonl", "*.jsonl.gz", "py.typed")


def _pyproject() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _source_files() -> dict[str, Path]:
    """Return every file that should be installed, by its name in the wheel."""
    found = {}
    for package, folder in _FOLDERS.items():
        for file in (_ROOT / folder).rglob("*"):
            inside = file.relative_to(_ROOT / folder)
            shipped = file.suffix == ".py" or any(file.match(pattern) for pattern in _DATA)
            if file.is_file() and shipped and "__pycache__" not in inside.parts:
                found[f"{package}/{inside.as_posix()}"] = file
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy, so that neither old build folders nor this tree take part."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("cli", "recipes", "eagle_train", "tests", "scripts"):
        shutil.copytree(_ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, folder / "tree" / name)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index"]
    made = subprocess.run(
        [*command, "-q", "-w", str(folder)], cwd=folder / "tree", capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_packages_listed_are_the_folders_of_the_tree():
    setuptools = _pyproject()["tool"]["setuptools"]
    assert setuptools["package-dir"] == _FOLDERS
    wanted = set()
    for package, folder in _FOLDERS.items():
        for module in (_ROOT / folder).rglob("*.py"):
            inside = module.parent.relative_to(_ROOT / folder)
            wanted.add(".".join([package, *inside.parts]))
    assert set(setuptools["packages"]) == wanted
    assert setuptools["packages"] == sorted(setuptools["packages"])


def test_wheel_holds_every_source_file_and_nothing_else(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    files = _source_files()
    assert set(names) == set(files)
    for name, file in files.items():
        assert wheel.read(name) == file.read_bytes(), name


def test_wheel_holds_recipes_data_and_the_mark_of_types(wheel):
    names = set(wheel.namelist())
    for name in (
        "eagle_recipes/eagle1.yaml",
        "eagle_recipes/eagle3.yaml",
        "eagle_recipes/eagle3-smollm2.yaml",
        "eagle_recipes/deepspeed/zero2.json",
        "eagle_recipes/deepspeed/zero3.json",
        "eagle_train/data/builtin/conversations.jsonl.gz",
        "eagle_train/data/builtin/heldout.jsonl",
        "eagle_train/py.typed",
    ):
        assert name in names


def test_nothing_is_installed_under_a_common_name(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(_FOLDERS)


def test_metadata_names_the_command_the_licence_and_light_requirements(wheel):
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert "eagle = eagle_cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    for heavy in ("deepspeed", "wandb", "pytest", "ruff"):
        lines = [line for line in required if line.startswith(f"Requires-Dist: {heavy}")]
        assert lines
        assert all("extra ==" in line for line in lines)


def test_an_installed_wheel_answers_and_loads_every_recipe(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    wheel.extractall(site)
    empty.mkdir()
    script = """
import eagle_cli.main, eagle_recipes, eagle_train
from eagle_train.recipe_files import load_recipe, recipe_names
for module in (eagle_cli, eagle_recipes, eagle_train):
    print(module.__name__, module.__file__)
for name in recipe_names():
    assert load_recipe(name).name == name
print(*recipe_names())
eagle_cli.main.main(["--version"])
"""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    *modules, recipes, version = ran.stdout.splitlines()
    for line in modules:
        name, file = line.split(maxsplit=1)
        assert Path(file) == site / name / "__init__.py"
    assert set(recipes.split()) == {file.stem for file in (_ROOT / "recipes").glob("*.yaml")}
    assert version == f"eagle {_pyproject()['project']['version']}"
