"""From nested values to a recipe: unknown keys, wrong types and impossible combinations are refused.

Each refusal is a UserError of one line naming where, key, what was got and what is wanted.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from eagle_train.config import SECTIONS, Recipe
from eagle_train.errors import UserError, nearest


def recipe_from_dict(values: dict[str, Any], name: str = "recipe") -> Recipe:
    """Return the recipe of nested dicts as `Recipe.to_dict` gives them; same errors as `load_recipe`."""
    check_keys(values, name)
    sections = {
        section: _section(f"recipe {name}: {section}", factory, values.get(section) or {})  # type: ignore[arg-type]
        for section, factory in SECTIONS.items()
    }
    recipe = Recipe(name=name, **sections)
    _check(recipe)
    return recipe


def check_keys(changes: dict[str, Any], where: str) -> None:
    """Raise UserError for a section or key that no recipe has."""
    for section, keys in changes.items():
        if section not in SECTIONS:
            raise UserError(
                f"{where}: unknown section '{section}', wanted one of {', '.join(SECTIONS)}"
                f"{nearest(str(section), SECTIONS)}"
            )
        if keys is not None and not isinstance(keys, dict):
            raise UserError(f"{where}: {section}: got {keys!r}, wanted keys and values")
        known = {f.name for f in dataclasses.fields(SECTIONS[section])}  # type: ignore[arg-type]
        for key in keys or {}:
            if key not in known:
                near = nearest(str(key), known).replace("'", f"'{section}.", 1)
                near = near or f"; known are {', '.join(sorted(known))}"
                raise UserError(f"{where}: unknown key '{section}.{key}'{near}")


def _section(where: str, factory: type, values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(factory)
    return factory(**{key: _typed(f"{where}.{key}", value, hints[key]) for key, value in values.items()})


def _typed(where: str, value: Any, wanted: Any) -> Any:
    """Return `value` as type `wanted`, or say what was got and what is wanted."""
    if type(value) is int and abs(value) >= _TOO_LARGE:  # maybe too long to print
        raise UserError(f"{where}: got a whole number of {value.bit_length()} bits, wanted one below 2**63")
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
        return _typed(where, int(value), int)
    if type(value) is not wanted:
        raise UserError(f"{where}: got {value!r} ({_type_name(value)}), wanted {_WORDS[wanted]}")
    return value


_TOO_LARGE = 2**63
_WORDS = {int: "a whole number", bool: "true or false", str: "text"}


def _type_name(value: Any) -> str:
    return {str: "text", type(None): "null"}.get(type(value), type(value).__name__)


_NORMS = ("layer_ids", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
_NOT_OF = {  # settings of `head` that some kinds do not have
    "eagle1": (*_NORMS, "draft_vocab_size"),
    "medusa": (*_NORMS, "num_hidden_layers", "intermediate_size", "qk_norm", "init_layer"),
}
_MAY_BE_ZERO = ("warmup_steps", "seed", "max_skipped", "init_layer")
_MOST = {  # far above any use: beyond, memory ends or float32 does
    "head.num_hidden_layers": 128,
    "head.intermediate_size": 2**20,
    "head.medusa_heads": 64,
    "loss.ttt_steps": 64,
    "loss.step_decay": 1,
    "optim.lr": 10,
    "optim.matrix_lr": 10,
    "run.eval_gamma": 64,
    "run.minutes": 366 * 24 * 60,
}


def _check(recipe: Recipe) -> None:
    """Refuse numbers out of range and combinations that cannot work or would silently do nothing."""

    def refuse_unless(fine: bool, words: str) -> None:
        if not fine:
            raise UserError(f"recipe {recipe.name}: {words}")

    for section in SECTIONS:
        for key, value in vars(getattr(recipe, section)).items():
            if type(value) is int:
                least = 0 if key in _MAY_BE_ZERO else 1
                refuse_unless(value >= least, f"{section}.{key}: got {value}, wanted {least} or more")
            if type(value) is float:
                fine = 0 <= value < float("inf")
                refuse_unless(fine, f"{section}.{key}: got {value}, wanted a number of 0 or more")
            most = _MOST.get(f"{section}.{key}")
            if most is not None and value is not None:
                refuse_unless(value <= most, f"{section}.{key}: got {value}, wanted at most {most}")
    head, loss, optim, data, run = recipe.head, recipe.loss, recipe.optim, recipe.data, recipe.run
    schedule = recipe.schedule
    for name in _NOT_OF.get(head.kind, ()):
        usual = type(head)().__dict__[name]
        refuse_unless(getattr(head, name) == usual, f"head.{name}: kind {head.kind} has none; remove it")
    layers = list(head.layer_ids)
    refuse_unless(
        layers == sorted(set(layers)) and min(layers, default=0) >= 0,
        f"head.layer_ids: got {layers}, wanted distinct layers of 0 or more, low to high",
    )
    refuse_unless(
        (head.kind == "medusa") == (head.medusa_heads is not None),
        "head: medusa_heads is for kind medusa, which needs it; set both or neither",
    )
    refuse_unless(optim.lr > 0 and optim.matrix_lr > 0, "optim: learning rates must be above 0")
    refuse_unless(
        all(0 <= beta < 1 for beta in (*optim.betas, optim.matrix_momentum, optim.ema)),
        "optim: betas, matrix_momentum and ema must lie in [0, 1)",
    )
    refuse_unless(0 < schedule.decay_share <= 1, "schedule.decay_share: wanted a share above 0, at most 1")
    refuse_unless(
        run.patience is None or data.held_out > 0,
        "run.patience: needs held-out conversations to judge by; set data.held_out above 0",
    )
    refuse_unless(schedule.final <= 1, "schedule.final: wanted a share of the peak, at most 1")
    refuse_unless(loss.step_decay > 0, "loss.step_decay: wanted a number above 0")
    refuse_unless(
        not loss.top_k_weight or loss.divergence == "cross_entropy",
        f"loss.top_k_weight: belongs to divergence cross_entropy, got {loss.divergence}; set one of the two",
    )
    refuse_unless(
        not loss.top_k_weight or head.kind != "eagle1" or loss.token_weight > 0,
        "loss.top_k_weight: needs a loss.token_weight above 0",
    )
    refuse_unless(
        (data.tokens_per_step is None) != (data.rows_per_step is None),
        "data: wanted exactly one of tokens_per_step and rows_per_step; set the other to null",
    )
    refuse_unless(
        data.held_out < 1 or data.held_out % 1 == 0,
        f"data.held_out: got {data.held_out}, wanted a share below 1 or a whole number of conversations",
    )
    budgets = [run.epochs, run.steps, run.tokens]
    refuse_unless(
        all(budget is None or budget < 2**53 for budget in budgets),
        "run: epochs, steps and tokens must be below 2**53",
    )
    refuse_unless(
        sum(budget is not None for budget in budgets) <= 1,
        "run: more than one of epochs, steps, tokens; set all but one to null",
    )
    refuse_unless(
        any(budget is not None for budget in (*budgets, run.minutes)) and run.minutes != 0,
        "run: no end; set one of run.epochs, run.steps, run.tokens, run.minutes",
    )
