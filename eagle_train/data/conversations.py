"""One record of any file becomes one conversation, is repaired, or is skipped with a reason.

The rules, one each; every repair and every skip is counted by its kind:

- Role names in the wild are read as user, assistant, system or tool; any other role skips the record.
- A list of text parts is joined by newlines, as serving engines do; a part that is no text skips it.
- A record's ``system`` field and system turns become system turns; equal ones appear once.
- Answers and tool turns before the first user turn are dropped: nothing prompted them.
- An empty or null turn ends the conversation before it; an empty system turn is as good as none.
- Two user, two assistant or two system turns in a row are joined by a blank line.
- What follows the last answer is dropped; without any answer the record is skipped.
- Text that is no valid Unicode (lone surrogates, broken UTF-8) makes a *bad* record, named by its place.

Where answers are to be made anew, all of this holds but for the answers: those there are left out, the
last prompt needs none, and what follows a tool turn is dropped, since a new answer need not call it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from eagle_train.data.records import (
    Conversation,
    Message,
    Skip,
    TokenRow,
    Turn,
    category_of,
    place_of,
    valid_text,
)
from eagle_train.data.token_rows import are_ids, read_token_row
from eagle_train.io.checksums import sha256_json

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
_QUESTIONS = "turns"  # MT-bench's form: user turns as plain texts

RECORD_FIELDS = (
    *("id", "category", "generated_by", "tools", _QUESTIONS),
    *(*_TURN_LISTS, *_SYSTEM_FIELDS, *_TOKEN_FIELDS),
)
"""Every top-level field that is looked at; columns of other names are never read."""

Notes = dict[str, None]
"""Repairs made to a record, each once, in order."""


def read_record(record: Any, source: str) -> Conversation | TokenRow:
    """Return the conversation (or token row) of one record; `source` names its place.

    Raises Skip with the reason, or BadRecord for damaged text.
    """
    if isinstance(record, dict) and record.get("input_ids") is not None:
        return read_token_row(record, source)
    notes: Notes = {}
    turns = _cut_to_prompt_and_answer(_turns(record, notes), notes)
    return _conversation(record, source, turns, notes)


def read_prompts(record: Any, source: str) -> Conversation:
    """Return the conversation of one record without its answers: system and user turns alone.

    Also reads a record whose ``turns`` are the user's texts. Raises Skip and BadRecord as `read_record`.
    """
    if isinstance(record, dict) and record.get("input_ids") is not None:
        raise Skip("tokens instead of a conversation")
    texts = record.get(_QUESTIONS) if isinstance(record, dict) else None
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        asked = [[{"role": "user", "content": text}, {"role": "assistant", "content": ""}] for text in texts]
        record = {**record, "messages": [turn for pair in asked for turn in pair]}
    notes: Notes = {}
    turns = _cut_to_prompts(_turns(record, notes), notes)
    return _conversation(record, source, turns, notes)


def _conversation(record: Any, source: str, turns: list[Turn], notes: Notes) -> Conversation:
    fields = record if isinstance(record, dict) else {}
    made_by = fields.get("generated_by")
    fingerprint = made_by.get("tokenizer_fingerprint") if isinstance(made_by, dict) else None
    record_id = fields.get("id")
    tools = _tools(fields.get("tools"))
    return Conversation(
        id=_hash(turns, tools),
        turns=tuple(turns),
        source=place_of(source, record_id),
        tokenizer_fingerprint=fingerprint if isinstance(fingerprint, str) else None,
        repairs=tuple(notes),
        tools=tuple(tools),
        record_id=record_id if isinstance(record_id, (str, int)) else None,
        category=category_of(fields),
    )


def _hash(turns: list[Turn], tools: list[Message]) -> str:
    said: list[Any] = [
        [turn.role, turn.content, turn.reasoning, *([list(turn.tool_calls)] if turn.tool_calls else [])]
        for turn in turns
    ]
    return sha256_json([*said, {"tools": tools}] if tools else said)[:16]


def _turns(record: Any, notes: Notes) -> list[Turn]:
    listed = _listed_turns(record)
    return _system_first(
        record if isinstance(record, dict) else {}, [_turn(item, notes) for item in listed], notes
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
    found = _parsed(found, "[", "the conversation is not a list of turns")
    if found is None or found == [] or found == "":
        raise Skip("empty conversation")
    if not isinstance(found, list):
        raise Skip("the conversation is not a list of turns")
    return found


def _parsed(value: Any, opens_with: str, reason: str) -> Any:
    """Open a value that was stored as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(opens_with):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Skip(reason) from error


def _turn(item: Any, notes: Notes) -> Turn:
    if not isinstance(item, dict):
        raise Skip("a turn is not an object")
    named = next((item[key] for key in ("role", "from") if item.get(key) is not None), None)
    if not isinstance(named, str):
        raise Skip("a turn without a role")
    role = ROLES.get(valid_text(named, "a role").strip().lower())
    if role is None:
        raise Skip("unknown role", repr(named[:40]))
    raw = next((item[key] for key in ("content", "value", "text") if item.get(key) is not None), None)
    reasoning = next((item[key] for key in _REASONING_FIELDS if item.get(key)), None)
    ids = item.get("answer_ids")
    if ids is not None and not are_ids(ids):
        raise Skip("answer_ids is not a list of token ids")
    if role == "tool" and named.strip().lower() != "tool":
        notes[f"role {named.strip().lower()} read as tool"] = None
    answers, tool = role == "assistant", role == "tool"
    return Turn(
        role=role,
        content=valid_text(_text(raw, notes), "a turn"),
        answer_ids=tuple(ids) if ids and answers else None,
        finished=item.get("finished") is not False,
        reasoning=valid_text(reasoning, "a thought") if isinstance(reasoning, str) and answers else None,
        tool_calls=tuple(_tool_calls(item.get("tool_calls"))) if answers else (),
        tool_name=item["name"] if tool and isinstance(item.get("name"), str) else None,
        tool_call_id=item["tool_call_id"] if tool and isinstance(item.get("tool_call_id"), str) else None,
    )


def _text(raw: Any, notes: Notes) -> str:
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


def _tool_calls(raw: Any) -> list[Message]:
    """Return calls as ``{"type": "function", "function": {"name", "arguments"}}``, arguments an object."""
    reason = "tool_calls is not a list of calls of functions"
    calls = _parsed(raw, "[", reason)
    if not calls:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Skip(reason)
    made = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Skip(reason)
        arguments = _parsed(function.get("arguments") or {}, "{", reason)
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        called = {"name": function["name"], "arguments": arguments}
        made.append({**kept, "type": "function", "function": called})
    valid_text(json.dumps(made, ensure_ascii=False), "a tool call")
    return made


def _tools(raw: Any) -> list[Message]:
    tools = _parsed(raw, "[", "tools is not a list of functions")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Skip("tools is not a list of functions")
    valid_text(json.dumps(tools, ensure_ascii=False), "tools")
    return tools


def _system_first(fields: dict[str, Any], turns: list[Turn], notes: Notes) -> list[Turn]:
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
    return [Turn("system", valid_text(text, "the system text")), *kept]


def _from_first_prompt(turns: list[Turn], missing: str, notes: Notes) -> list[Turn]:
    """Drop what stands before the first user turn, system turns excepted."""
    if not turns or all(turn.role == "system" for turn in turns):
        raise Skip("system turn only" if turns else "empty conversation")
    first = next((place for place, turn in enumerate(turns) if turn.role == "user"), None)
    if first is None:
        raise Skip(missing)
    lead = [turn for turn in turns[:first] if turn.role == "system"]
    if len(lead) < first:
        notes["answer before the first prompt dropped"] = None
    return lead + turns[first:]


def _cut_to_prompt_and_answer(turns: list[Turn], notes: Notes) -> list[Turn]:
    """Apply the rules on order and emptiness; what is left starts with a prompt and ends with an answer."""
    if any(turn.role == "user" for turn in turns) and all(turn.role != "assistant" for turn in turns):
        raise Skip("no answer")
    kept = _from_first_prompt(turns, "no prompt before the answer", notes)
    for place, turn in enumerate(kept):
        if turn.is_empty:
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


def _cut_to_prompts(turns: list[Turn], notes: Notes) -> list[Turn]:
    """Apply the same rules to what is to be answered anew; what is left ends with a user turn."""
    kept = _from_first_prompt(turns, "no prompt", notes)
    for place, turn in enumerate(kept):
        if turn.role == "tool" or (turn.role != "assistant" and turn.is_empty):
            kind = "a tool" if turn.role == "tool" else "an empty"
            notes[f"cut before {kind} turn"] = None
            kept = kept[:place]
            break
    prompts = [turn for turn in _join_repeated(kept, notes) if turn.role != "assistant"]
    while prompts and prompts[-1].role != "user":
        prompts.pop()
    if not prompts:
        raise Skip("an empty turn before the first answer")
    return prompts


def _join_repeated(turns: list[Turn], notes: Notes) -> list[Turn]:
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role and turn.role != "tool":
            notes[f"{turn.role} turns in a row joined"] = None
            before = joined[-1]
            text = "\n\n".join(filter(None, (before.content, turn.content)))
            calls = before.tool_calls + turn.tool_calls
            joined[-1] = replace(
                turn, content=text, answer_ids=None, reasoning=before.reasoning, tool_calls=calls
            )
        else:
            joined.append(turn)
    return joined
