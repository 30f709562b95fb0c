"""What a target's generation_config does to its logits, beside temperature, top-k and top-p."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from eagle_train.errors import UserError

# What changes logits by the text, what only cuts the law of a sample, and what depends on more than the text
# (another forward, an encoder, the loop's own limits) or draws in another way.
BY_TEXT = (
    "sequence_bias",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
)
OF_THE_LAW = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
REFUSED = (
    "guidance_scale",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "forced_eos_token_id",
    "remove_invalid_values",
    "watermarking_config",
    "top_h",
    "renormalize_logits",
)
_OFF: dict[str, tuple[Any, ...]] = {  # values that do nothing; where no others are named, 0 and what is empty
    "repetition_penalty": (1,),
    "typical_p": (1,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (0, 1),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}


def check_file(file: Path, name: str) -> None:
    """Raise UserError where a generation_config.json is no JSON object, or transformers refuses a value.

    transformers loads as if there were none where it cannot parse the file, and its settings would be lost;
    of a value that it cannot take it does not say whose it is.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{name}: generation_config.json: cannot be read ({error}), wanted a JSON object; fetch the "
            "file again, or remove it to decode without its settings"
        ) from error
    if not isinstance(found, dict):
        raise UserError(
            f"{name}: generation_config.json: got a {type(found).__name__}, wanted a JSON object; mend the "
            "file, or remove it to decode without its settings"
        )
    refused = _refused(found)
    if refused is None:
        return
    without = (key for key in found if _refused({k: v for k, v in found.items() if k != key}) is None)
    alone = (key for key, value in found.items() if _refused({key: value}) is not None)
    key = next(chain(without, alone), None)  # one key may be allowed by another, such as by do_sample
    if key is None:
        raise UserError(f"{name}: generation_config.json: {refused}; mend the file")
    wanted = _LOADED.get(key, f"what transformers takes ({refused})")
    raise UserError(
        f"{name}: generation_config.json: {key}: got {_shown(found[key])}, wanted {wanted}; mend the "
        "file, or take the key out"
    )


def _refused(settings: dict[str, Any]) -> str | None:
    """Return in one line why transformers does not take these settings together, None where it does."""
    from transformers import GenerationConfig

    try:
        GenerationConfig(**settings)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def own_settings(generation_config: Any) -> dict[str, Any]:
    """Return those settings that do something, by name, as JSON has them and as yet unchecked.

    The config is an object, a record of one, or None.
    """
    is_record = isinstance(generation_config, Mapping)
    found = {}
    for key in (*BY_TEXT, *OF_THE_LAW, *REFUSED):
        value = generation_config.get(key) if is_record else getattr(generation_config, key, None)
        if value is None or value is False or (value is not True and value in _OFF.get(key, (0, [], {}))):
            continue
        if key == "sequence_bias" and isinstance(value, Mapping) and all(isinstance(k, tuple) for k in value):
            value = [[list(tokens), bias] for tokens, bias in value.items()]
        found[key] = value.to_dict() if hasattr(value, "to_dict") else value
    return found


def check_settings(settings: Mapping[str, Any], name: str, vocab_size: int | None = None) -> None:
    """Raise UserError for the first of a target's own settings that its processor cannot work with.

    `vocab_size` is V; None where it is not known: then token ids are only held to be 0 or more.
    """
    most = inf if vocab_size is None else vocab_size
    for key, value in settings.items():
        if key in _KINDS:
            fits, wanted = _KINDS[key]
            if not fits(value, most):
                if "token id" in wanted and vocab_size is not None:
                    wanted += f" below {vocab_size}"
                raise bad_setting(name, key, value, wanted)


def checked_eos(value: Any, name: str) -> list[int]:
    """Return the ids that end an answer, given as one, a list or None; raise UserError for anything else."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_whole(i) for i in ids):
        raise UserError(
            f"{name}: generation_config.json: eos_token_id: got {_shown(value)}, wanted a token id, 0 or "
            "more, or a list of them; mend the file (or config.json, where it is set there)"
        )
    return ids


def bad_setting(name: str, key: str, value: Any, wanted: str) -> UserError:
    """Return the error for a setting of a target's generation_config."""
    return UserError(
        f"{name}: generation_config.json: {key}: got {_shown(value)}, wanted {wanted}; mend the file, or "
        "give --no-processors to decode without the target's own processors"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _whole(value: Any, below: float = inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def _number(value: Any, lowest: float = -inf, highest: float = inf) -> bool:
    """True for a finite number within these bounds; NaN lies within none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and lowest <= value <= highest and abs(value) < inf


def _ids(value: Any, below: float) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_whole(i, below) for i in value)


def _biased(value: Any, below: float) -> bool:
    """True for a pair of ids and a bias that is a float, as transformers wants it, and finite."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and _ids(value[0], below) and isinstance(value[1], float) and _number(value[1])


_Kind = tuple[Callable[[Any, float], bool], str]  # does a value fit, the vocabulary being so large; in words
_COUNT: _Kind = (lambda v, most: _whole(v), "a whole number, 0 (off) or more")
_TOKENS: _Kind = (_ids, "a list of whole numbers, each a token id")
_CUTOFF: _Kind = (lambda v, most: _number(v, 0, 1) and v < 1, "a number from 0 (off), below 1")
_LOADED = {  # without which no target loads, in words where the library's own say less
    "max_new_tokens": "a whole number above 0",
    "pad_token_id": "a token id, 0 or more",
}
_KINDS: dict[str, _Kind] = {
    "sequence_bias": (
        lambda v, most: isinstance(v, list) and all(_biased(one, most) for one in v),
        "a list of pairs [ids, bias], the bias written with a point such as 2.0, each of the ids a token id",
    ),
    "repetition_penalty": (lambda v, most: _number(v, 0) and v > 0, "a number above 0 (1 is off)"),
    "no_repeat_ngram_size": _COUNT,
    "bad_words_ids": (
        lambda v, most: isinstance(v, list) and all(_ids(word, most) for word in v),
        "a list of lists of whole numbers, none empty, each a token id",
    ),
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "forced_bos_token_id": (_whole, "a whole number, a token id"),
    "exponential_decay_length_penalty": (
        lambda v, most: (
            isinstance(v, list | tuple) and len(v) == 2 and _whole(v[0]) and _number(v[1], 0) and v[1] > 0
        ),
        "a pair [start, factor]: a whole number of tokens and a number above 0",
    ),
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "min_p": (lambda v, most: _number(v, 0, 1), "a number from 0 (off) to 1"),
    "typical_p": (lambda v, most: _number(v, 0, 1) and v > 0, "a number above 0, at most 1 (off)"),
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
}
