"""The longest text that a family can read: positions end, or RoPE changes its angles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def rope_switch(config: PretrainedConfig) -> int | None:
    """Return the length from which on RoPE turns every token by other angles; None for most families.

    Longrope (Phi-3 and 4 with long contexts) and dynamic scaling choose angles by the longest text of a
    forward, so states beyond that length depend on what was read together.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    found = []
    for kind in [rope] if "rope_type" in rope else [value for value in rope.values() if value]:
        if kind["rope_type"] == "dynamic":
            found.append(config.max_position_embeddings)
        if kind["rope_type"] == "longrope":
            original = kind.get("original_max_position_embeddings")
            found.append(original or config.original_max_position_embeddings)
    return min(found, default=None)


def table_length(config: PretrainedConfig) -> int | None:
    """Return how many positions a family's table holds (learned, or computed once); None with RoPE."""
    rope = any(getattr(config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    if rope or getattr(config, "alibi", False):
        return None
    return getattr(config, "max_position_embeddings", None)


def longest_text(config: PretrainedConfig) -> int | None:
    """Return the most tokens that a text may have; None where the family sets no bound."""
    bounds = (rope_switch(config), table_length(config))
    return min((bound for bound in bounds if bound is not None), default=None)


def check_length(config: PretrainedConfig, length: int, where: str) -> None:
    """Raise UserError, beginning with `where`, for a text longer than the family's positions or angles."""
    longest = longest_text(config)
    if longest is None or length <= longest:
        return
    if longest == table_length(config):
        raise UserError(
            f"{where}: {length} tokens, wanted at most {longest}: this target has no positions beyond; use "
            "shorter texts, or fewer new tokens"
        )
    raise UserError(
        f"{where}: {length} tokens, wanted at most {longest}: beyond, this target's RoPE changes the angles "
        "of every token, and states depend on what is read together; use shorter texts"
    )
