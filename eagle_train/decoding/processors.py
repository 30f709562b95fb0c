"""What the target's own generation_config does to its logits, beside temperature, top-k and top-p.

Each processor is transformers' own and a function of the text so far (and of where the answer began), so it
is honoured at every node of a tree, whose text is its path. Order: that of transformers' generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle_train.errors import UserError
from eagle_train.targets.generation import (
    BY_TEXT,
    OF_THE_LAW,
    REFUSED,
    bad_setting,
    check_settings,
    own_settings,
)

_WHY_NOT = {"forced_eos_token_id": "depends on the most tokens asked for, not on the text"}


@dataclass(frozen=True)
class Processors:
    """The processors that a target's generation_config sets, by name. `eos_ids` are the target's."""

    values: dict[str, Any] = field(default_factory=dict, hash=False)
    eos_ids: tuple[int, ...] = ()

    def by_text(self, logits: Tensor, text: Sequence[int], begun: int) -> Tensor:
        """Return logits [V] after what `text` makes of them; the answer began at token `begun`."""
        made = _by_text(self.values, self.eos_ids, begun, str(logits.device))
        return _run(made, logits, text) if made else logits

    def of_the_law(self, law: Tensor) -> Tensor:
        """Return a law [.., V] cut as when sampling, after temperature, top-k and top-p."""
        made = _of_the_law(self.values, str(law.device))
        if not made:
            return law
        return _run(made, law.reshape(-1, law.shape[-1]).log(), ()).softmax(-1).view(law.shape)


def own_processors(
    generation_config: Any, eos_ids: Sequence[int], name: str, vocab_size: int | None = None
) -> Processors | None:
    """Return what a target's generation_config, or the record of one, sets; None where nothing.

    `vocab_size` is the target's, where it is known. Raises UserError naming the first setting that cannot be
    honoured in a tree, or whose value none can be honoured by.
    """
    given = own_settings(generation_config)
    for key in REFUSED:
        if key in given:
            why = _WHY_NOT.get(key, "is more than a function of the text so far")
            raise UserError(
                f"{name}: its generation_config sets {key} to {str(given[key])[:40]}, which {why}; "
                "give --no-processors to decode without the target's own processors"
            )
    check_settings(given, name, vocab_size)
    for key, value in given.items():  # whatever else the library itself does not take
        if (fault := _why_not_made(key, value, tuple(eos_ids))) is not None:
            raise bad_setting(name, key, value, f"what transformers takes ({fault})")
    return Processors(given, tuple(eos_ids)) if given else None


def _why_not_made(key: str, value: Any, eos_ids: tuple[int, ...]) -> str | None:
    """Return why transformers cannot make the processor of one setting; None where it can."""
    try:
        _by_text({key: value}, eos_ids, begun=1, device="cpu")
        _of_the_law({key: value}, device="cpu")
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None


def _run(made: list[Any], scores: Tensor, text: Sequence[int]) -> Tensor:
    """Run processors on scores, [V] or [n, V], as float32 or wider."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    rows = wide[None] if wide.ndim == 1 else wide
    ids = torch.tensor([list(text)], device=scores.device, dtype=torch.long)
    for one in made:
        rows = one(ids, rows)
    return rows.view(wide.shape)


def _by_text(values: dict[str, Any], eos_ids: tuple[int, ...], begun: int, device: str) -> list[Any]:
    import transformers.generation.logits_process as library

    eos = torch.tensor(eos_ids, device=device)
    makers = {
        "sequence_bias": lambda v: library.SequenceBiasLogitsProcessor(v),
        "repetition_penalty": lambda v: library.RepetitionPenaltyLogitsProcessor(float(v)),
        "no_repeat_ngram_size": lambda v: library.NoRepeatNGramLogitsProcessor(v),
        "bad_words_ids": lambda v: library.NoBadWordsLogitsProcessor(v, eos),
        "min_length": lambda v: library.MinLengthLogitsProcessor(v, eos, device=device),
        "min_new_tokens": lambda v: library.MinNewTokensLengthLogitsProcessor(begun, v, eos, device=device),
        "forced_bos_token_id": lambda v: library.ForcedBOSTokenLogitsProcessor(v),
        "exponential_decay_length_penalty": lambda v: library.ExponentialDecayLengthPenalty(
            tuple(v), eos, begun
        ),
        "suppress_tokens": lambda v: library.SuppressTokensLogitsProcessor(v, device=device),
        "begin_suppress_tokens": lambda v: library.SuppressTokensAtBeginLogitsProcessor(
            v, begun, device=device
        ),
    }
    return [makers[key](values[key]) for key in BY_TEXT if key in values]


def _of_the_law(values: dict[str, Any], device: str) -> list[Any]:
    import transformers.generation.logits_process as library

    makers = {
        "min_p": lambda v: library.MinPLogitsWarper(v),
        "typical_p": lambda v: library.TypicalLogitsWarper(v),
        "epsilon_cutoff": lambda v: library.EpsilonLogitsWarper(v),
        "eta_cutoff": lambda v: library.EtaLogitsWarper(v, device=device),
    }
    return [makers[key](values[key]) for key in OF_THE_LAW if key in values]
