"""One record of any file becomes one conversation, is repaired, or is skipped with a reason.

The rules, one each; every repair and every skip is counted by its text:

- Role names in the wild are read as user, assistant, system or tool; any other role skips the record.
- A list of text parts is joined by newlines, as serving engines do; a part that is no text skips it.
- A record's ``system`` field and system turns become system turns; equal ones appear once.
- Answers and tool turns before the first user turn are dropped: nothing prompted them.
- An empty or null turn ends the conversation before it; an empty system turn is as good as none.
- Two user, two assistant or two system turns in a row are joined by a blank line.
- What follows the last answer is dropped; without any answer the record is skipped.
- Text that is no valid Unicode (lone surrogates, broken UTF-8) makes a *bad* record, named by its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from eagle_train.io import sha256_json

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}

_TURN_LISTS = ("conversations", "messages", "conversation", "dialogue", "dialog")
_SYSTEM_FIELDS = ("system", "system_prompt")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TOKEN_FIELDS = ("input_ids", "loss_mask", "spans", "conversation_id", "row_id", "source")

RECORD_FIELDS = ("id", "generated_by", *_TURN_LISTS, *_SYSTEM_FIELDS, *_TOKEN_FIELDS)
"""Every top-level field that is looked at; columns of other names are never read."""


class Skip(Exception):
    """This record gives no row; the text is the reason it is counted under."""


class BadRecord(Exception):
    """This record is damaged; the text says how. Kept out only when the user asks for it."""


@dataclass(frozen=True)
class Turn:
    """One turn. `answer_ids` are the target's own tokens where it wrote the answer, with the
    end-of-turn token exactly when `finished`."""

    role: str
    content: str
    answer_ids: tuple[int, ...] | None = None
    finished: bool = True
    reasoning: str | None = None

    def message(self) -> dict[str, str]:
        """Return what a chat template reads."""
        if self.reasoning is None:
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": self.content, "reasoning_content": self.reasoning}


@dataclass(frozen=True)
class Conversation:
    """Turns ready for a template: starts with (system and) user, ends with assistant.

    `id` is a hash of roles and texts, so copies of one conversation share it whatever file or
    record id they came with, and a split by it never tears them apart.
    """

    id: str
    turns: tuple[Turn, ...]
    source: str
    tokenizer_fingerprint: str | None = None
    repairs: tuple[str, ...] = ()

    def messages(self) -> list[dict[str, str]]:
        """Return all turns as a chat template reads them."""
        return [turn.message() for turn in self.turns]


@dataclass(frozen=True)
class TokenRow:
    """A record that came with its tokens. `spans` are [first, last], inclusive."""

    conversation_id: str
    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    source: str
    repairs: tuple[str, ...] = ()


def read_record(record: Any, source: str) -> Conversation | TokenRow:
    """Return the conversation (or token row) of one record; `source` names its place.

    Raises Skip with the reason, or BadRecord for damaged text.
    """
    if isinstance(record, dict) and record.get("input_ids") is not None:
        return _token_row(record, source)
    listed = _listed_turns(record)
    fields = record if isinstance(record, dict) else {}
    notes: dict[str, None] = {}
    turns = [_turn(item, notes) for item in listed]
    turns = _system_first(fields, turns, notes)
    turns = _cut_to_prompt_and_answer(turns, notes)
    made_by = fields.get("generated_by")
    fingerprint = made_by.get("tokenizer_fingerprint") if isinstance(made_by, dict) else None
    return Conversation(
        id=sha256_json([[turn.role, turn.content, turn.reasoning] for turn in turns])[:16],
        turns=tuple(turns),
        source=_source(source, fields.get("id")),
        tokenizer_fingerprint=fingerprint if isinstance(fingerprint, str) else None,
        repairs=tuple(notes),
    )


def _listed_turns(record: Any) -> list[Any]:
    if isinstance(record, list):
        found: Any = record
    elif isinstance(record, dict):
        present = [key for key in _TURN_LISTS if key in record]
        if not present:
            raise Skip("no conversation in the record")
        found = next((record[key] for key in present if record[key] is not None), None)
    else:
        raise Skip("the record is not an object")
    if isinstance(found, str) and found.lstrip().startswith("["):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise Skip("the conversation is not a list of turns") from error
    if found is None or found == [] or found == "":
        raise Skip("empty conversation")
    if not isinstance(found, list):
        raise Skip("the conversation is not a list of turns")
    return found


def _turn(item: Any, notes: dict[str, None]) -> Turn:
    if not isinstance(item, dict):
        raise Skip("a turn is not an object")
    named = next((item[key] for key in ("role", "from") if item.get(key) is not None), None)
    if not isinstance(named, str):
        raise Skip("a turn without a role")
    role = ROLES.get(named.strip().lower())
    if role is None:
        raise Skip(f"unknown role '{named[:40]}'")
    raw = next((item[key] for key in ("content", "value", "text") if item.get(key) is not None), None)
    reasoning = next((item[key] for key in _REASONING_FIELDS if item.get(key)), None)
    ids = item.get("answer_ids")
    if ids is not None and not _are_ids(ids):
        raise Skip("answer_ids is not a list of token ids")
    if role == "tool" and named.strip().lower() != "tool":
        notes[f"role {named.strip().lower()} read as tool"] = None
    return Turn(
        role=role,
        content=_valid(_text(raw, notes)),
        answer_ids=tuple(ids) if ids and role == "assistant" else None,
        finished=item.get("finished") is not False,
        reasoning=_valid(reasoning) if isinstance(reasoning, str) and role == "assistant" else None,
    )


def _text(raw: Any, notes: dict[str, None]) -> str:
    if raw is None:
        return ""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise Skip("the text of a turn is not a string")
    parts = []
    for part in raw:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise Skip("a part of a turn is not text")
        parts.append(text)
    notes["text parts joined"] = None
    return "\n".join(parts)


def _valid(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRecord(f"text is not valid Unicode (character {error.start} of a turn)") from error
    return text


def _system_first(fields: dict[str, Any], turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """Put the record's system text before the turns, unless a system turn says the same."""
    text = next((fields[key] for key in _SYSTEM_FIELDS if fields.get(key)), None)
    if text is not None and not isinstance(text, str):
        raise Skip("the system text is not a string")
    kept = [turn for turn in turns if turn.role != "system" or turn.content.strip()]
    if len(kept) < len(turns):
        notes["empty system turn dropped"] = None
    if not text or not text.strip():
        return kept
    if any(turn.role == "system" and turn.content.strip() == text.strip() for turn in kept):
        return kept
    return [Turn("system", _valid(text)), *kept]


def _cut_to_prompt_and_answer(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """Apply the rules on order and emptiness; what is left starts with a prompt and ends with an answer."""
    if not turns or all(turn.role == "system" for turn in turns):
        raise Skip("system turn only" if turns else "empty conversation")
    if all(turn.role != "assistant" for turn in turns):
        raise Skip("no answer")
    first = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise Skip("no prompt before the answer")
    lead = [turn for turn in turns[:first] if turn.role == "system"]
    if len(lead) < first:
        notes["answer before the first prompt dropped"] = None
    kept = lead + turns[first:]
    for place, turn in enumerate(kept):
        if not turn.content.strip():
            notes["cut before an empty turn"] = None
            kept = kept[:place]
            break
    joined = _join_repeated(kept, notes)
    last = max((place for place, turn in enumerate(joined) if turn.role == "assistant"), default=None)
    if last is None:
        raise Skip("an empty turn before the first answer")
    if last + 1 < len(joined):
        notes["turn without an answer dropped"] = None
    return joined[: last + 1]


def _join_repeated(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role and turn.role != "tool":
            notes[f"{turn.role} turns in a row joined"] = None
            text = joined[-1].content + "\n\n" + turn.content
            reasoning = joined[-1].reasoning
            joined[-1] = replace(turn, content=text, answer_ids=None, reasoning=reasoning)
        else:
            joined.append(turn)
    return joined


def _token_row(record: dict[str, Any], source: str) -> TokenRow:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not _are_ids(ids) or not ids:
        raise Skip("input_ids is not a list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids) or any(bit not in (0, 1) for bit in mask):
        raise Skip("loss_mask is not a list of 0 and 1, one per token")
    spans = record.get("spans")
    found = spans_of(mask) if spans is None else [tuple(span) for span in spans]
    rebuilt = [0] * len(ids)
    for span in found:
        if len(span) != 2 or not all(isinstance(end, int) for end in span) or not 0 <= span[0] <= span[1]:
            raise Skip("spans are not pairs [first, last]")
        rebuilt[span[0] : span[1] + 1] = [1] * (span[1] + 1 - span[0])
    if rebuilt != [int(bit) for bit in mask]:
        raise Skip("spans and loss_mask disagree")
    if not found:
        raise Skip("loss_mask supervises nothing")
    if found[0][0] == 0:
        raise Skip("loss_mask supervises the first token: no prompt before the answer")
    known = record.get("conversation_id")
    return TokenRow(
        conversation_id=str(known) if known is not None else sha256_json(ids)[:16],
        input_ids=tuple(ids),
        spans=tuple((first, last) for first, last in found),
        source=_source(source, record.get("id")),
    )


def spans_of(mask: list[int]) -> list[tuple[int, int]]:
    """Return the runs of ones in `mask` as (first, last), inclusive."""
    spans, first = [], None
    for place, bit in enumerate([*mask, 0]):
        if bit and first is None:
            first = place
        elif not bit and first is not None:
            spans.append((first, place - 1))
            first = None
    return spans


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _source(place: str, record_id: Any) -> str:
    if not isinstance(record_id, (str, int)) or record_id == "":
        return place
    return f"{place}:{record_id}".encode("utf-8", "replace").decode("utf-8")
