"""Recipes as YAML files: found by name or path, laid over those they extend, changed by ``--set``.

Every file and the overrides are layers, each written over the one below. A layer that names one of a
group of alternatives (`config.ONE_OF`) drops what the layers below chose from that group.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from eagle_train.config import ONE_OF, Recipe
from eagle_train.errors import UserError, nearest
from eagle_train.recipe_checks import check_keys, recipe_from_dict

Values = dict[str, dict[str, Any]]  # section -> key -> value as YAML gives it


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes, sorted."""
    folder = importlib.resources.files("eagle_recipes")
    return sorted(e.name.removesuffix(".yaml") for e in folder.iterdir() if e.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of that built-in name or file, with ``section.key=value`` overrides applied.

    Raises UserError for a recipe not found, a key unknown, a value of the wrong type, or a
    combination that cannot work; the message gives the nearest known name.
    """
    values = _read(_named(str(name_or_path)), seen=())
    changes: Values = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise UserError(f"--set {override}: wanted SECTION.KEY=VALUE, such as optim.lr=1e-4")
        changes.setdefault(section, {})[name] = _parse(text, f"--set {override}")
    _lay_over(values, changes, "--set")
    return recipe_from_dict(values, Path(name_or_path).name.removesuffix(".yaml"))


def _read(path: Path, seen: tuple[Path, ...]) -> Values:
    """Read one file and those it extends into nested dicts with known keys only."""
    if path in seen:
        raise UserError(f"{path}: extends itself by way of {seen[-1].name}; remove one 'extends:'")
    try:
        own = _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a text file ({error})") from error
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise UserError(f"{path}: holds a {type(own).__name__}, wanted sections such as 'optim:'")
    base = own.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise UserError(f"{path}: extends: got {base!r}, wanted the name or path of one recipe")
    values = _read(_extended(base, path), (*seen, path)) if base else {}
    _lay_over(values, own, str(path))
    return values


def _named(name: str) -> Path:
    """Find what the user names: a file, else a built-in recipe."""
    return _file(Path(name)) or _built_in(name, f"recipe '{name}'")


def _extended(name: str, by: Path) -> Path:
    """Find what the recipe `by` extends: a file beside it, else a built-in recipe."""
    return _file(by.parent / name) or _built_in(name, f"{by}: extends '{name}'")


def _file(path: Path) -> Path | None:
    try:
        return path.resolve() if path.is_file() else None
    except (OSError, ValueError) as error:  # such as a name too long
        raise UserError(f"recipe '{path}': cannot be read ({error}); give a name or a file") from error


def _built_in(name: str, where: str) -> Path:
    known = recipe_names()
    if name in known:
        return Path(str(importlib.resources.files("eagle_recipes") / f"{name}.yaml")).resolve()
    raise UserError(
        f"{where}: no such file and no built-in recipe{nearest(name, known)} (built in: {', '.join(known)})"
    )


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no such date or number
        raise UserError(f"{where}: not valid YAML ({error})") from error


def _lay_over(values: Values, layer: dict[str, Any], where: str) -> None:
    """Write `layer` over `values`, refusing sections and keys that no recipe has."""
    check_keys(layer, where)
    for section, keys in layer.items():
        for group in ONE_OF.get(section, ()):
            if any((keys or {}).get(key) is not None for key in group):
                values.setdefault(section, {}).update(dict.fromkeys(group))
        values.setdefault(section, {}).update(keys or {})
