"""RoPE settings of a config.json, old or new, as one flat dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_train.errors import UserError


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE settings as one flat dict with rope_type and rope_theta, from old or new configs.

    Targets with settings per attention kind give those of full attention. A partial rotation is
    dropped: the head's own layer rotates whole heads, as engines do.
    """
    rope = dict(config.get("rope_parameters") or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    if not rope:
        rope = dict(config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    for key in ("type", "partial_rotary_factor", "mrope_section"):
        rope.pop(key, None)
    if rope["rope_type"] == "longrope" and "original_max_position_embeddings" not in rope:
        rope["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
        if rope["original_max_position_embeddings"] is None:
            raise UserError("config.json: RoPE is longrope without original_max_position_embeddings; add it")
    if rope["rope_type"] == "mrope":  # text-only positions: the three sections agree
        rope["rope_type"] = "default"
    return rope
