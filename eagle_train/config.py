"""Recipes: YAML files read strictly into one frozen dataclass.

A recipe names only what differs from the defaults below, or from another recipe (``extends:``). An
unknown key, a wrong type or an impossible combination is a UserError naming file, key, got, wanted.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from eagle_train.errors import UserError, nearest


@dataclass(frozen=True)
class HeadRecipe:
    """The draft head's shape. All else (widths, heads, RoPE, epsilon) comes from the target."""

    kind: Literal["eagle1", "eagle3"] = "eagle3"
    layer_ids: tuple[int, ...] = ()  # captured layers, hs convention; () takes what the shards hold
    draft_vocab_size: int | None = None  # most frequent supervised tokens; null = all of the target's
    num_hidden_layers: int = 1
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm on each feature before fc
    norm_output: bool = False  # EAGLE-3.1: the normed output is fed to the next step
    intermediate_size: int | None = None  # null = the target's


@dataclass(frozen=True)
class LossRecipe:
    """What is minimised. ttt_* are EAGLE-3's, the rest EAGLE-1's."""

    ttt_steps: int = 7  # steps of the training-time test
    step_decay: float = 0.8  # weight of step i is step_decay ** i
    feature_weight: float = 1.0  # SmoothL1 on the predicted feature
    token_weight: float = 0.1  # soft cross-entropy on the token
    noise: float = 0.1  # input features get uniform(-noise, noise) * 512 / length, in training only


@dataclass(frozen=True)
class OptimRecipe:
    """AdamW on all parameters, or Muon on the matrices of fc and layers and AdamW on the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 5e-5  # of AdamW
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    matrix_lr: float = 0.02  # of Muon
    matrix_momentum: float = 0.95
    matrix_weight_decay: float = 0.0
    clip_norm: float = 0.5  # of the whole gradient; 0 = no clipping


@dataclass(frozen=True)
class ScheduleRecipe:
    """Learning rate: linear warm-up, then a decay down to ``final`` of the peak at the budget's end."""

    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    final: float = 0.0


@dataclass(frozen=True)
class DataRecipe:
    """What an optimizer step sees: whole rows, up to a number of tokens or of rows."""

    tokens_per_step: int | None = 16384
    rows_per_step: int | None = None
    micro_tokens: int = 4096  # tokens of one forward; bounds memory, changes no result
    held_out: float = 64  # conversations: a share (below 1) or a number


@dataclass(frozen=True)
class RunRecipe:
    """How long, how exact, how often. One of epochs, steps, tokens; minutes may cap it or stand alone."""

    epochs: int | None = None
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None  # by the clock, so a resumed run is not bit-equal to an unbroken one
    seed: int = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # of arithmetic; weights and Adam stay fp32
    eval_every: int = 500  # optimizer steps
    eval_gamma: int = 3  # guesses of the chain whose acceptance length is predicted
    save_every: int = 1000
    log_every: int = 10
    keep_last: int = 2  # checkpoints kept beside the best
    max_skipped: int = 20  # steps whose gradient was not finite, before the run stops


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe. ``name`` is the file's stem, for messages."""

    name: str = "recipe"
    head: HeadRecipe = field(default_factory=HeadRecipe)
    loss: LossRecipe = field(default_factory=LossRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain nested dicts and lists, every key written out."""
        return _plain({key: value for key, value in dataclasses.asdict(self).items() if key != "name"})

    def to_yaml(self) -> str:
        """Return the recipe as YAML that `load_recipe` reads back to an equal one."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


_LENGTHS = {"epochs", "steps", "tokens"}  # of which a run has at most one
_SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Recipe) if f.name != "name"}


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes, sorted."""
    folder = importlib.resources.files("eagle_recipes")
    return sorted(e.name.removesuffix(".yaml") for e in folder.iterdir() if e.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path, overrides: typing.Sequence[str] = ()) -> Recipe:
    """Return the recipe of that built-in name or file, with ``section.key=value`` overrides applied.

    Raises UserError for a recipe not found, a key unknown, a value of the wrong type, or a
    combination that cannot work; the message gives the nearest known name.
    """
    values = _read(str(name_or_path), seen=())
    named: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise UserError(f"--set {override}: wanted SECTION.KEY=VALUE, such as optim.lr=1e-4")
        value = _parse(text, f"--set {override}")
        if section == "run" and name in _LENGTHS and value is not None:  # replaces the recipe's length
            _merge(values, {"run": dict.fromkeys(_LENGTHS - named)}, "--set")
            named.add(name)
        _merge(values, {section: {name: value}}, "--set")
    return recipe_from_dict(values, Path(name_or_path).name.removesuffix(".yaml"))


def recipe_from_dict(values: dict[str, Any], name: str = "recipe") -> Recipe:
    """Return the recipe of nested dicts as `Recipe.to_dict` gives them; same errors as `load_recipe`."""
    _merge({}, values, name)
    sections = {
        section: _section(f"recipe {name}: {section}", factory, values.get(section) or {})  # type: ignore[arg-type]
        for section, factory in _SECTIONS.items()
    }
    recipe = Recipe(name=name, **sections)
    _check(recipe)
    return recipe


def _read(name_or_path: str, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Read one file and those it extends into nested dicts with known keys only."""
    path = _find(name_or_path, seen[-1].parent if seen else Path())
    if path in seen:
        raise UserError(f"{path}: extends itself by way of {seen[-1].name}; remove one 'extends:'")
    try:
        own = _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a text file ({error})") from error
    if own is None:
        own = {}
    if not isinstance(own, dict):
        raise UserError(f"{path}: holds a {_type_name(own)}, wanted sections such as 'optim:'")
    base = own.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise UserError(f"{path}: extends: got {base!r}, wanted the name or path of one recipe")
    values = _read(base, (*seen, path)) if base else {}
    _merge(values, own, str(path))
    return values


def _find(name: str, beside: Path) -> Path:
    """Find a recipe by path (also relative to the recipe that names it) or among the built-in ones."""
    for candidate in (Path(name), beside / name):
        if candidate.is_file():
            return candidate.resolve()
    built_in = Path(str(importlib.resources.files("eagle_recipes") / f"{name}.yaml"))
    if built_in.is_file():
        return built_in.resolve()
    known = recipe_names()
    raise UserError(
        f"recipe '{name}': no such file and no built-in recipe{nearest(name, known)} "
        f"(built in: {', '.join(known)})"
    )


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise UserError(f"{where}: not valid YAML ({error})") from error


def _merge(values: dict[str, Any], changes: dict[str, Any], where: str) -> None:
    """Write `changes` over `values`, refusing sections and keys that no recipe has."""
    for section, keys in changes.items():
        if section not in _SECTIONS:
            raise UserError(
                f"{where}: unknown section '{section}', wanted one of {', '.join(_SECTIONS)}"
                f"{nearest(str(section), _SECTIONS)}"
            )
        if keys is not None and not isinstance(keys, dict):
            raise UserError(f"{where}: {section}: got {keys!r}, wanted keys and values")
        known = {f.name for f in dataclasses.fields(_SECTIONS[section])}  # type: ignore[arg-type]
        for key in keys or {}:
            if key not in known:
                near = nearest(str(key), known) or f"; known are {', '.join(sorted(known))}"
                raise UserError(f"{where}: unknown key '{section}.{key}'{near}")
        values.setdefault(section, {}).update(keys or {})


def _section(where: str, factory: type, values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(factory)
    return factory(**{key: _typed(f"{where}.{key}", value, hints[key]) for key, value in values.items()})


def _typed(where: str, value: Any, wanted: Any) -> Any:
    """Return `value` as type `wanted`, or say what was got and what is wanted."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType:  # X | None
        return None if value is None else _typed(where, value, arguments[0])
    if origin is Literal:
        if value in arguments:
            return value
        words = " or ".join(str(word) for word in arguments)
        raise UserError(f"{where}: got {value!r}, wanted {words}{nearest(str(value), map(str, arguments))}")
    if origin is tuple:
        fixed = arguments[-1] is not Ellipsis
        if isinstance(value, list | tuple) and (not fixed or len(value) == len(arguments)):
            return tuple(_typed(where, one, arguments[0]) for one in value)
        raise UserError(f"{where}: got {value!r}, wanted a list{f' of {len(arguments)}' if fixed else ''}")
    if wanted is float:
        try:
            if not isinstance(value, bool):
                return float(value)  # also '1e-4', which YAML reads as text
        except (TypeError, ValueError):
            pass
        raise UserError(f"{where}: got {value!r}, wanted a number")
    if wanted is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not wanted:
        raise UserError(f"{where}: got {value!r} ({_type_name(value)}), wanted {_WORDS[wanted]}")
    return value


_WORDS = {int: "a whole number", bool: "true or false", str: "text"}


def _type_name(value: Any) -> str:
    return {str: "text", type(None): "null"}.get(type(value), type(value).__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


_MAY_BE_ZERO = ("warmup_steps", "seed", "max_skipped")


def _check(recipe: Recipe) -> None:
    """Refuse numbers out of range and combinations that cannot work or would silently do nothing."""

    def refuse_unless(fine: bool, words: str) -> None:
        if not fine:
            raise UserError(f"recipe {recipe.name}: {words}")

    for section in _SECTIONS:
        for key, value in vars(getattr(recipe, section)).items():
            if type(value) is int:
                least = 0 if key in _MAY_BE_ZERO else 1
                refuse_unless(value >= least, f"{section}.{key}: got {value}, wanted {least} or more")
            if type(value) is float:
                fine = 0 <= value < float("inf")
                refuse_unless(fine, f"{section}.{key}: got {value}, wanted a number of 0 or more")
    head, optim, data, run = recipe.head, recipe.optim, recipe.data, recipe.run
    reduced = head.fc_norm or head.norm_output or head.draft_vocab_size or head.layer_ids
    refuse_unless(
        head.kind == "eagle3" or not reduced,
        "head: kind eagle1 has no fc_norm, norm_output, draft_vocab_size or layer_ids; remove them",
    )
    refuse_unless(optim.lr > 0 and optim.matrix_lr > 0, "optim: learning rates must be above 0")
    refuse_unless(
        all(0 <= beta < 1 for beta in (*optim.betas, optim.matrix_momentum)),
        "optim: betas and matrix_momentum must lie in [0, 1)",
    )
    refuse_unless(recipe.schedule.final <= 1, "schedule.final: wanted a share of the peak, at most 1")
    refuse_unless(recipe.loss.step_decay > 0, "loss.step_decay: wanted a number above 0")
    refuse_unless(
        (data.tokens_per_step is None) != (data.rows_per_step is None),
        "data: wanted exactly one of tokens_per_step and rows_per_step; set the other to null",
    )
    refuse_unless(
        data.held_out < 1 or data.held_out.is_integer(),
        f"data.held_out: got {data.held_out}, wanted a share below 1 or a whole number of conversations",
    )
    budgets = [run.epochs, run.steps, run.tokens]
    refuse_unless(
        all(budget is None or budget < 2**53 for budget in budgets) and 0 <= run.seed < 2**63,
        "run: epochs, steps and tokens must be below 2**53, seed below 2**63 and not negative",
    )
    refuse_unless(
        sum(budget is not None for budget in budgets) <= 1,
        "run: more than one of epochs, steps, tokens; set all but one to null",
    )
    refuse_unless(
        any(budget is not None for budget in (*budgets, run.minutes)) and run.minutes != 0,
        "run: no end; set one of run.epochs, run.steps, run.tokens, run.minutes",
    )
